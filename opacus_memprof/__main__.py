# SPDX-License-Identifier: Apache-2.0
"""`python -m opacus_memprof` is `opacus-memprof`."""

from opacus_memprof.cli import main

main()
