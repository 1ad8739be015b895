# SPDX-License-Identifier: Apache-2.0
"""A store for a rank that is simulated without the others, instead of torch.distributed's TCPStore."""

import re
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store

_UNIQUE_ID = b"\1" * 128  # an ncclUniqueId, which rank 0 would set
_NUMBER = re.compile(r"\d+")


class SingleRankStore(Store):
    """A store that behaves as if every rank had made this rank's calls. It never waits, and counters count all ranks.

    A key that only another rank would set has the value of this rank's key of the same pattern: `host/7` has that of
    `host/0`. Without such a key, the value is an ncclUniqueId, by which NCCL's ranks find each other.
    """

    def __init__(self, world_size: int) -> None:
        super().__init__()
        self._world_size = world_size
        self._values: dict[str, bytes] = {}
        self._by_pattern: dict[str, bytes] = {}  # by the key with every number replaced by #

    def set(self, key: str, value: str | bytes) -> None:
        stored = value.encode() if isinstance(value, str) else bytes(value)
        self._values[key] = self._by_pattern[_NUMBER.sub("#", key)] = stored

    def get(self, key: str) -> bytes:
        if key in self._values:
            return self._values[key]
        return self._by_pattern.get(_NUMBER.sub("#", key), _UNIQUE_ID)

    def add(self, key: str, amount: int) -> int:
        total = int(self._values.get(key, b"0")) + amount * self._world_size
        self._values[key] = str(total).encode()
        return total

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        if self._values.get(key, b"").decode(errors="replace") == expected:
            self.set(key, desired)
        return self.get(key)

    def append(self, key: str, value: str | bytes) -> None:
        self.set(key, self._values.get(key, b"") + (value.encode() if isinstance(value, str) else bytes(value)))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Returns immediately, as if the other ranks had set the keys."""

    def delete_key(self, key: str) -> bool:
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        return len(self._values)

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> "SingleRankStore":
        return self

    def set_timeout(self, timeout: timedelta) -> None:
        """Does nothing, because nothing is waited for."""


class SingleRankTCPStore(SingleRankStore):
    """Replaces TCPStore for programs that construct one. Takes the same arguments."""

    def __init__(self, host_name: str = "", port: int = 0, world_size: int | None = None, *_: Any, **__: Any) -> None:
        super().__init__(world_size or 1)
