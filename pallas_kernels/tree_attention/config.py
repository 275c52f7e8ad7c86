"""Block sizes: a frozen config, and the pure function of shapes, dtype and device that chooses it."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Config:
    rows: int = 0
    keys: int = 0
    splits: int = 0
    stages: int = 0
    interpret: Any = False
