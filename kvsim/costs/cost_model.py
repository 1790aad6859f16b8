"""What a step costs: passes, moves, rotations, and copies to the host tier, as a machine profile has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvsim.costs.devices import USUAL_BUS, Device, carried_gb_s, devices
from kvsim.costs.pass_price import PassPrice
from kvsim.costs.profile import CopyCost, Profile
from kvsim.errors import NoTimes, UserError
from kvsim.model.engine_shapes import Storage
from policies import Group, HostCopy, Kernel, Moves, RelativeCosts, Shift, Transfer
from policies.placement.rule import GroupReads

_CPU_BYTES_PER_S = {True: 1.5e9, False: 6e9}
"""Out to host memory that is newly allocated, and back: medians of llama.cpp's own functions (llama-cpp-python 0.3.36,
``llama_state_seq_get_data`` and ``..._set_data``) with SmolLM2 135M, 32 to 1,024 tokens, on two virtual cores of a
Xeon."""


@dataclass(frozen=True, slots=True)
class HostLink:
    """Bandwidth and latency between the cache and the host tier, as a scenario states them."""

    bytes_per_s: float
    latency_s: float
    """Seconds that each run of cells takes beside its bytes."""
    cell_bytes: float
    """Bytes of K and V of one token in all layers."""


class BeforePass(NamedTuple):
    """Seconds of what is done to one cache group before a pass."""

    moves_s: float
    shift_s: float
    transfers_s: float
    mapping_s: float


class CostModel:
    """Predicts seconds from a profile, and remembers when it was asked beyond what was measured.

    Without a ``link``, a copy to or from the host tier costs what the bus of the device carries, and without a device
    what the profile measured for one inside the cache.
    """

    def __init__(
        self,
        profile: Profile,
        link: HostLink | None = None,
        cell_bytes: float = 0.0,
        map_page_s: float = 0.0,
        device: Device | None = None,
        drafts: int = 0,
    ):
        """``cell_bytes``: bytes of K and V of one token in all layers, for copies that the profile has not measured.

        ``map_page_s``: seconds to map a page of virtual memory in all layers. ``device``: whose bus copies to the host
        take, without a ``link``; by default that of the profile. ``drafts``: the most drafted tokens of a sequence in a
        pass that checks them.
        """
        self.profile = profile
        self._drafts = drafts
        self._map_page_s = map_page_s
        self._link = link
        device = device or devices().get(profile.device or "")
        self._bus = USUAL_BUS if device is None else device.bus
        rate = carried_gb_s(USUAL_BUS, 0.0) if device is None else device.bus_gb_s
        self._bus_bytes_per_s = None if profile.device is None else 1e9 * rate
        self.step_copies_s = 0.0
        """Seconds of copies to and from the host tier that passes waited for."""
        self._cell_bytes = cell_bytes
        self._prices: dict[tuple[Kernel, tuple[Group, ...]], PassPrice] = {}

    def pass_price(self, kernel: Kernel, groups: Sequence[Group] = (Group(0),)) -> PassPrice:
        """The price of forward passes under a kernel over some cache groups; the same object for equal arguments."""
        key = kernel, tuple(groups)
        if key not in self._prices:
            self._prices[key] = PassPrice(self.profile, kernel, groups, self._drafts)
        return self._prices[key]

    def before_pass(self, reads: GroupReads, group: Group) -> BeforePass:
        """Seconds of the moves, rotations, copies and mappings that one cache group must see before its pass."""
        copies_s = group.share * self.transfers(reads.transfers) if reads.transfers else 0.0
        self.step_copies_s += copies_s
        return BeforePass(
            group.share * self.moves(reads.moves) if reads.moves.n_runs else 0.0,
            group.share * self.shift(reads.shift, group) if len(reads.shift.cells) else 0.0,
            copies_s,
            group.share * self.mapping(reads.mapped),
        )

    @property
    def most_tokens(self) -> int:
        """Tokens of the largest pass that was priced."""
        return max((price.most_tokens for price in self._prices.values()), default=0)

    @property
    def most_cells(self) -> int:
        """Cells that one token was scored against, at most, in the passes that were priced."""
        return max((price.most_cells for price in self._prices.values()), default=0)

    @property
    def most_chunks(self) -> int:
        """Chunks of the pass with the most."""
        return max((price.most_chunks for price in self._prices.values()), default=0)

    def moves(self, moves: Moves) -> float:
        """Seconds to carry out a compaction."""
        if moves.n_runs == 0:
            return 0.0
        return self.move_runs(moves.n_runs, moves.n_cells)

    def shift(self, shift: Shift, group: Group) -> float:
        """Seconds to rotate keys in a cache group."""
        cells = group.cells if self.profile.shifts_all and len(shift.cells) else len(shift.cells)
        return self.profile.shift_per_cell_s.value * cells

    def transfers(self, transfers: Sequence[Transfer]) -> float:
        """Seconds to copy runs of cells between the cache and the host tier."""
        return self._between_tiers(len(transfers), sum([transfer.n for transfer in transfers]))

    def host_copies(self, copy: HostCopy) -> float:
        """Seconds to copy a whole sequence between the cache and host memory.

        As the scenario states it, else as the profile measured it, else by a stated bandwidth.
        """
        runs, cells, measured = len(copy.transfers), copy.cells, self.profile.host_copies
        if self._link is not None:
            return self._between_tiers(runs, cells)
        if not cells:
            return 0.0
        if measured is not None:
            return measured.seconds(runs, cells, out=copy.to_host)
        if self._own_moves is not None:
            return self._own_moves.per_run_s.value * runs + self._own_moves.per_cell_s.value * cells
        return cells * self._cell_bytes / (self._bus_bytes_per_s or _CPU_BYTES_PER_S[copy.to_host])

    def mapping(self, pages: int) -> float:
        """Seconds to map pages of virtual memory in all layers."""
        return self._map_page_s * pages

    def _between_tiers(self, runs: int, cells: int) -> float:
        if not runs:
            return 0.0
        if self._link is not None:
            return self._link.latency_s * runs + cells * self._link.cell_bytes / self._link.bytes_per_s
        if self._bus_bytes_per_s is not None:
            return cells * self._cell_bytes / self._bus_bytes_per_s
        return self.move_runs(runs, cells)

    @property
    def host_copies_basis(self) -> str | None:
        """On what that rests, in words; None where it was stated by the scenario or measured, if only by copies inside
        the cache on the same machine."""
        if self._link is not None or self.profile.host_copies is not None or self._own_moves is not None:
            return None
        if self._bus_bytes_per_s is not None:
            return f"at {self._bus_bytes_per_s / 1e9:g} GB/s, what its {self._bus} carries (machine.host_gb_s)"
        out, back = (_CPU_BYTES_PER_S[way] / 1e9 for way in (True, False))
        return f"at {out:g} GB/s out and {back:g} back, as llama.cpp did on another machine"

    @property
    def _own_moves(self) -> CopyCost | None:
        """The costs of copies inside the cache, where copies to the host are done alike: on the machine's memory."""
        return self.profile.moves if self.profile.device is None else None

    def move_runs(self, runs: int, cells: int) -> float:
        """Seconds to copy ``cells`` cells in ``runs`` runs. Raises ``UserError`` if the profile has no such cost."""
        cost = self.profile.moves
        if cost is None:
            raise UserError(f"profile {self.profile.name} knows no cost of moving cells: {self._still}")
        each = cost.per_run_s.value * runs + cost.per_cell_s.value * cells
        return cost.per_pass_s.value + each

    def relative(self, kernel: Kernel) -> RelativeCosts | None:
        """What an adaptive trigger weighs, in seconds; None if the profile lacks the kernel or the cost of moves."""
        profile, moves = self.profile, self.profile.moves
        if moves is None or not (profile.measured_kernel(kernel) or profile.device):
            return None
        if profile.tables is None:
            cell_s = profile.kernel_costs(profile.decode, kernel).per_cell_s.value
        else:
            cell_s = profile.tables.cell_s
        return RelativeCosts(cell_s, moves.per_run_s.value, moves.per_cell_s.value)

    def check(self, model: str, kernel: Kernel, type_k: Storage = "f32", type_v: Storage = "f32") -> None:
        """Raise ``NoTimes`` unless the profile was measured with this model and cache, ``UserError`` if it lacks the
        kernel."""
        if reason := self.profile.why_no_times(model, type_k, type_v):
            raise NoTimes(reason)
        if self.profile.tables is None:
            self.profile.kernel_costs(self.profile.decode, kernel)

    def check_moves(self, policy: str) -> None:
        """Raise ``UserError`` if the profile has no cost for the moves that a policy makes."""
        if self.profile.moves is None:
            raise UserError(f"profile {self.profile.name} knows no cost of {policy}'s moves: {self._still}")

    @property
    def _still(self) -> str:
        return f"{self.profile.engine} never moves any cells"

    def warnings(self) -> list[str]:
        """One line if the profile was refused, and for each way in which the run went beyond the measured range."""
        p, found = self.profile, []
        if p.refused is not None:
            found.append(f"profile {p.name} was refused when it was measured: {p.refused}")
        if self.most_tokens > p.tokens.high:
            found.append(
                f"a forward pass had {self.most_tokens} tokens; the profile was measured up to {p.tokens.high}"
            )
        if self.most_cells > p.cells.high:
            found.append(
                f"tokens were scored against {self.most_cells} cells; the profile was measured up to {p.cells.high}"
            )
        if p.sequences is not None and self.most_chunks > p.sequences:
            found.append(
                f"a forward pass had {self.most_chunks} sequences; the profile was measured up to {p.sequences}"
            )
        if p.tables is not None and found:
            found[-1] += ". Beyond what was measured, times grow as bytes and operations do"
        return found
