"""What a run does about actors that die: it tells, counts, and brings new engines the weights of now."""

from __future__ import annotations

from contextlib import nullcontext

from rolegraph.group import RoleGroup
from rolegraph.interfaces import RolloutRole
from rolegraph.recovery import Care, Ranks
from rolegraph.telemetry import Telemetry
from rolegraph.turns import PHASES, TurnTaker
from rolegraph.weights import WeightSync


class RunCare(Care):
    """Starts the replicas of a run again, and the ranks of its teachers.

    A new engine has the weights of the start. It joins by the trainer's weights of now: alone, beside whatever the
    other engines do, in a turn of the trainer where that has its devices in turn; or, where engines themselves move off
    the devices they share, with all of them at rest in the middle of their turn, so that the trainer can be there for
    the transfer.
    """

    def __init__(self, max_restarts: int, turns: TurnTaker, telemetry: Telemetry) -> None:
        self.max_restarts = max_restarts
        self.sync: WeightSync | None = None
        """The way of weights to `rollout`, once there is one."""
        self.rollout: RoleGroup[RolloutRole] | None = None
        self._turns = turns
        self._telemetry = telemetry

    async def join(self, role: str, ranks: Ranks) -> None:
        """Bring engines that train together with the trainer up to date; others need nothing."""
        if role != "rollout" or self.sync is None or self.rollout is None:
            return
        if not self.in_turn(role):
            # The trainer may have devices of its own, or share them with others than engines, a teacher say.
            turn = self._turns.take("sync", PHASES["sync"]) if self.in_turn("train") else nullcontext()
            async with turn:
                for rank in ranks:
                    await self.sync.bring(self.rollout.handle, rank)
            return
        async with self.rollout.drained(), self._turns.interlude("sync", PHASES["sync"]):
            await self.sync.renew()

    def tell(self, text: str) -> None:
        """An event of the run."""
        self._telemetry.event(text)

    def restarted(self, role: str) -> None:
        """`restarts/ROLE` in the next step's line."""
        self._telemetry.count(f"restarts/{role}")

    def in_turn(self, role: str) -> bool:
        """Whether something moves on the devices of the role."""
        return self._turns.turns.shares(role)
