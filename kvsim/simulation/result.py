"""One finished run: its figures and, where they were asked for, its tables."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvsim.errors import UserError
from kvsim.simulation.run_tables import Table, Tables
from kvsim.simulation.snapshots import Frame

if TYPE_CHECKING:
    import pandas as pd

    from kvsim.scenario.scenario import Scenario


@dataclass(frozen=True)
class Result:
    """The figures of one run of one scenario under one policy, and its tables, if they were asked for."""

    scenario: Scenario = field(repr=False)
    policy: str
    summary: dict[str, Any] = field(repr=False)
    """The object that ``--json`` prints; docs/json.md has its keys."""
    ended_s: float
    """Simulated seconds at the end."""
    tables: Tables | None = field(default=None, repr=False)
    frames: tuple[Frame, ...] = field(default=(), repr=False)
    """Snapshots of the cells, where they were asked for."""
    warnings: tuple[str, ...] = ()
    """One line each: where the prediction went beyond what the profile measured, what was left out of a trace or mended
    in it, and whether arrivals outpaced service."""
    notes: tuple[str, ...] = ()
    """Warnings about the workload, which are the same under every policy."""

    @property
    def requests(self) -> pd.DataFrame:
        """One row for each request. Raises ``UserError`` if no tables were kept."""
        return self.kept_tables.requests.frame

    @property
    def cache(self) -> pd.DataFrame:
        """The state of the cache over time. Raises ``UserError`` if it was not kept."""
        if self.kept_tables.cache is None:
            raise UserError(f'{self.policy}: states of the cache were not kept; ask for them with detail="states"')
        return self.kept_tables.cache.frame

    @property
    def passes(self) -> pd.DataFrame:
        """One row for each forward pass. Raises ``UserError`` if they were not kept."""
        return self.table_of_passes.frame

    @property
    def causes(self) -> pd.DataFrame:
        """What each completed request's seconds were spent on. Raises ``UserError`` if that was not kept."""
        return self.table_of_causes.frame

    @property
    def table_of_passes(self) -> Table:
        """One row for each forward pass, as in ``passes``, but without loading pandas. Raises ``UserError``."""
        if self.kept_tables.passes is None:
            raise UserError(f'{self.policy}: its passes were not kept; ask for them with detail="tables"')
        return self.kept_tables.passes

    @property
    def table_of_causes(self) -> Table:
        """One row for each request with its seconds by cause, as in ``causes``, but without loading pandas."""
        if self.kept_tables.causes is None:
            if self.kept_tables.passes is None:
                raise UserError(
                    f'{self.policy}: what its seconds were spent on was not kept; ask for it with detail="tables"'
                )
            raise UserError(f"{self.policy}: there was no cost model to say what the seconds were spent on")
        return self.kept_tables.causes

    @property
    def kept_tables(self) -> Tables:
        """All tables. Raises ``UserError`` if none were kept."""
        if self.tables is None:
            raise UserError(f'{self.policy}: no tables were kept of this run; ask for them with detail="tables"')
        return self.tables
