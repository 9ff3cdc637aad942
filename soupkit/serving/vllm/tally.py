"""What happened to the variants of one server so far, counted on its event loop."""

from collections.abc import Callable, Container
from dataclasses import dataclass, field


@dataclass(slots=True)
class Counts:
    """Of one variant, or of all.

    Attributes:
        waiting: requests that wait for a load now. seconds: the last load's, of copying and checks.
    """

    loads: int = 0
    failures: int = 0
    evictions: int = 0
    waiting: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class Tally:
    """Of all variants ever, and of each that the family has.

    Attributes:
        on_load: called with the seconds of each load, from the decision to when it is served.
    """

    total: Counts = field(default_factory=Counts)
    by_name: dict[str, Counts] = field(default_factory=dict)
    on_load: Callable[[float], object] = float

    def of(self, name: str) -> Counts:
        return self.by_name.setdefault(name, Counts())

    def loaded(self, name: str, seconds: float) -> None:
        self.total.loads += 1
        self.of(name).loads += 1
        self.on_load(seconds)

    def failed(self, name: str) -> None:
        self.total.failures += 1
        self.of(name).failures += 1

    def evicted(self, name: str) -> None:
        self.total.evictions += 1
        self.of(name).evictions += 1

    def keep(self, names: Container[str]) -> None:
        """Forgets all variants but these, and those that somebody waits for."""
        gone = [name for name, c in self.by_name.items() if name not in names and not c.waiting]
        for name in gone:
            del self.by_name[name]
