"""Types of the module that setup.py writes next to the extension, with the versions that it was built for."""

VERSION: str  # of opacus-memprof
TORCH_VERSION: str | None  # in full, as 2.15.0+cu132; None if only the part that reads profiles was built
TORCH_CUDA: str | None  # as 13.2; None for a torch without CUDA
ALLOCATOR_HEADERS: str  # a hash: versions.hash_allocator_headers
HAS_CUDA: bool  # CUDA's allocator is compiled in
PYTHON: str
COMPILER: str
