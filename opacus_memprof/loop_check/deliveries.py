# SPDX-License-Identifier: Apache-2.0
"""Checks that steps are made with new batches of the private loader, and that the accountant counts what was drawn."""

from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from opacus.utils.uniform_sampler import DistributedUniformWithReplacementSampler, UniformWithReplacementSampler
from torch.utils._pytree import tree_leaves

from opacus_memprof.loop_check.records import Call, Delivery, Findings

_MANY = 1 << 62  # rows of a batch without tensors


class Deliveries:
    """Checks that steps train on the samples for which epsilon is computed: new batches of the private loader.

    The inputs of a call are compared with the last batches, because any code may be between loader and model. If it
    changes them, the number of batches is still known.

    Args:
        findings: receives the defects.
    """

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._samplers: list[Any] = []  # of the loaders that make_private returned
        self._is_poisson = False
        self._drawn = 0  # private batches
        self._rows = 0  # of private batches
        self._samples: dict[int, int] = {}  # that an optimizer has made steps with
        self._recent: deque[Delivery] = deque(maxlen=16)
        self._others = 0  # batches of other loaders since the last step
        self._is_matched = False  # whether inputs of a step were those of a batch
        self._accounted: list[tuple[float, float]] = []  # noise multipliers and rates since the last step

    def on_prepare(self, original: Any, engine: Any, loader: Any, /, **kwargs: Any) -> Any:
        """Wraps PrivacyEngine's preparation of a data loader."""
        prepared = original(engine, loader, **kwargs)
        self._samplers.append(getattr(prepared, "_index_sampler", None))
        if kwargs.get("poisson_sampling", True):
            self._is_poisson = True
        else:
            self._findings.note(
                "poisson_sampling=False: the accountant computes epsilon for Poisson sampling, which this loader does "
                "not do.",
                "poisson",
            )
            sampler = getattr(prepared, "sampler", None)
            if getattr(sampler, "replacement", False):
                self._findings.defect(
                    f"{type(sampler).__name__} draws with replacement: a batch can have a sample several times, each "
                    "time clipped by itself, but the noise is for once. Leave poisson_sampling=True, which samples "
                    "anew, or draw without replacement.",
                    "replacement",
                )
        return prepared

    def on_accounted(self, original: Any, accountant: Any, /, **kwargs: float) -> Any:
        """Wraps the step of an accountant."""
        self._accounted.append((kwargs["noise_multiplier"], kwargs["sample_rate"]))
        return original(accountant, **kwargs)

    def on_next(self, original: Any, iterator: Any, /) -> Any:
        """Wraps `__next__` of the iterators of data loaders. The batch is kept, not copied."""
        data = original(iterator)
        sampler = self._private_sampler(iterator._index_sampler)
        is_private = sampler is not None
        self._others = 0 if is_private and not self._drawn else self._others + (not is_private)
        self._drawn += is_private
        # torch's trees know dicts, but not other mappings, such as those of transformers.
        leaves = tree_leaves(dict(data) if isinstance(data, Mapping) else data)
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        self._rows += is_private * next((len(x) for x in tensors if x.dim()), _MANY)
        self._recent.append(Delivery(is_private, getattr(sampler, "sample_rate", 0.0), tensors))
        return data

    def sources(self, inputs: Any) -> list[Delivery]:
        """Returns the batches that a call's inputs are equal to, or are rows of."""
        mine = [x.detach().cpu() for x in tree_leaves(inputs) if isinstance(x, torch.Tensor) and x.dim()]
        mine = [x for x in mine if len(x) and bool((x != x.flatten()[0]).any())]  # all masks of ones are equal
        return [each for each in self._recent if any(_is_part(x, y) for y in each.tensors for x in mine)]

    def check(self, steps: int, calls: list[Call], optimizer: Any, samples: int) -> None:
        """Looks for a step whose epsilon does not hold: other batches than the loader drew, or a wrong accountant.

        Args:
            steps: the number of steps of this optimizer, with this one.
            calls: the model's calls in this step, with the batches that their inputs come from.
            optimizer: the private optimizer.
            samples: how many samples were clipped.
        """
        self._check_accountant(float(optimizer.noise_multiplier), calls)
        self._samples[id(optimizer)] = clipped = self._samples.get(id(optimizer), 0) + samples
        if self._drawn and clipped > self._rows:
            self._findings.not_checked(
                "whether each sample is clipped once",
                f"the model got {clipped} samples where the loader had drawn {self._rows}: where several come from one "
                "(augmented views, windows, tokens), each is clipped by itself, and that one contributes up to the "
                "bound several times.",
                "copies",
            )
        others, self._others = self._others, 0
        found = [call.sources for call in calls if call.sources]
        unknown = ""
        if not self._samplers and not self._drawn:
            unknown = "the script does not call make_private."
        elif not self._drawn or any(not any(each.is_private for each in sources) for sources in found):
            if self._samplers and not self._is_poisson:
                unknown = "the script trains on others than those of its loader."
            else:
                self._findings.defect(
                    "The script trains on batches that do not come from the loader that make_private "
                    "returned: epsilon does not hold for them. Train on new batches of the loader that "
                    "make_private returned.",
                    "source",
                )
        elif self._drawn < steps and self._is_matched and not found:
            unknown = "there are more steps than batches, and some are on inputs that are in no batch."
        elif self._drawn < steps or any(
            all(id(optimizer) in each.used for each in sources if each.is_private) for sources in found
        ):
            self._findings.defect(
                "The script makes several steps with the same batch, but epsilon is that of a new one in each step. "
                "Train on new batches of the loader that make_private returned.",
                "source",
            )
        elif others and len(found) < len(calls):
            unknown = "the script draws from other loaders, too, and changes the batches before the model gets them."
        if unknown:
            self._findings.not_checked("whether the batches are drawn as the accountant assumes", unknown, "source")
        self._is_matched = self._is_matched or bool(found)
        for sources in found:
            for each in sources:
                each.used.add(id(optimizer))

    def _check_accountant(self, noise: float, calls: list[Call]) -> None:
        accounted, self._accounted = self._accounted, []
        if not accounted:
            if self._samplers:
                self._findings.not_checked("epsilon", "no accountant of Opacus has counted the step.", "epsilon")
            return
        counted, rate = max(each for each, _ in accounted), max(each for _, each in accounted)
        if noise < counted * (1 - 1e-6):
            self._findings.defect(
                f"The accountant counts a noise_multiplier of {counted:.4g}, but the optimizer's is {noise:.4g}: "
                "epsilon is too small.",
                "multiplier",
            )
        drawn = max((min(each.rate for each in call.sources) for call in calls if call.sources), default=0.0)
        if drawn > rate * (1 + 1e-6):
            self._findings.defect(
                f"Samples are drawn with a probability of {drawn:.4g}, but the accountant counts {rate:.4g}: epsilon "
                "is too small. Call make_private with the loader of the data that are trained on.",
                "rate of samples",
            )

    def _private_sampler(self, sampler: Any) -> Any:
        """Follows samplers of samplers, as those of BatchMemoryManager and Accelerate."""
        while sampler is not None:
            if isinstance(sampler, (UniformWithReplacementSampler, DistributedUniformWithReplacementSampler)) or any(
                sampler is each for each in self._samplers
            ):
                return sampler
            sampler = getattr(sampler, "batch_sampler", getattr(sampler, "sampler", None))
        return None


def _is_part(part: torch.Tensor, whole: torch.Tensor) -> bool:
    """Returns whether a tensor has consecutive rows of another one, or is a view of it."""
    if part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr():
        return True
    if not whole.dim() or len(whole) < len(part) or whole.numel() * len(part) != part.numel() * len(whole):
        return False
    rows, all_rows = part.reshape(len(part), -1), whole.detach().to("cpu", part.dtype).reshape(len(whole), -1)
    starts = (all_rows == rows[0]).all(1).nonzero().flatten().tolist()
    return any(torch.equal(all_rows[start : start + len(rows)], rows) for start in starts)
