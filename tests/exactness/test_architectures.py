# SPDX-License-Identifier: Apache-2.0
"""flash_clip is exact on architectures that no other test names, or refuses them with a sentence.

They train with dropout, drop path and gradient checkpoints.
"""

import pytest

pytest.importorskip("transformers")
pytest.importorskip("torchvision")

import transformers as hf

from tests.exactness.architectures import ARCHITECTURES, COVERED
from tests.exactness.messages import lacks

NIGHTLY = {name for others in COVERED.values() for name in others}
assert COVERED.keys() <= ARCHITECTURES.keys() - NIGHTLY
assert ARCHITECTURES.keys() >= NIGHTLY


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly if name in NIGHTLY else ()) for name in ARCHITECTURES]
)
def test_outcome(name: str) -> None:
    architecture = ARCHITECTURES[name]
    if architecture.config and not hasattr(hf, architecture.config):
        pytest.skip(f"transformers {hf.__version__} does not have {architecture.config}")
    program = architecture.program(name)
    verdict = program.verdict()
    assert program.accepts(verdict), f"{verdict.outcome} where {program.allowed} is allowed: {verdict.message}"
    if verdict.outcome == "refused":
        assert not lacks(verdict.message), f"{lacks(verdict.message)}: {verdict.message}"
