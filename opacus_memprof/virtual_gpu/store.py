# SPDX-License-Identifier: Apache-2.0
"""The store of a rank that is played without the others, in the place of torch.distributed's TCPStore."""

import re
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store

_UNIQUE_ID = b"\1" * 128  # NCCL's, which rank 0 would give
_NUMBER = re.compile(r"\d+")


class LonelyStore(Store):
    """Answers as if every rank had done what this one has: nothing is waited for, counters count all ranks.

    Keys that only others would have set read as this rank's of the same form (`host/7` as what it has put into
    `host/0`), and where there is none as the id by which NCCL's ranks find each other.
    """

    def __init__(self, world_size: int) -> None:
        super().__init__()
        self._world_size = world_size
        self._values: dict[str, bytes] = {}
        self._alike: dict[str, bytes] = {}  # by key with every number replaced

    def set(self, key: str, value: str | bytes) -> None:
        stored = value.encode() if isinstance(value, str) else bytes(value)
        self._values[key] = self._alike[_NUMBER.sub("#", key)] = stored

    def get(self, key: str) -> bytes:
        if key in self._values:
            return self._values[key]
        return self._alike.get(_NUMBER.sub("#", key), _UNIQUE_ID)

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
        """Returns at once: the others have set what is waited for."""

    def delete_key(self, key: str) -> bool:
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        return len(self._values)

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> "LonelyStore":
        return self

    def set_timeout(self, timeout: timedelta) -> None:
        """There is nothing to wait for."""


class LonelyTCPStore(LonelyStore):
    """What a program gets that makes a TCPStore itself; takes its arguments."""

    def __init__(self, host_name: str = "", port: int = 0, world_size: int | None = None, *_: Any, **__: Any) -> None:
        super().__init__(world_size or 1)
