"""What it costs to score every client after every round.

The work of `training`, with 180 test images per client. An evaluation scores two models of each client: the
personalized one, as the server would send it now, and the one it held after its latest training. Rounds and evaluations
take turns.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.federation import Federation
from benchmarks.measuring import Row, in_turns
from benchmarks.work import Work
from pfedla import PFedLA

__all__ = ["measure"]

TEST_IMAGES = 180


def measure(quick: bool) -> list[Row]:
    """Return a line for each number of local epochs."""
    usual = Work(clients=2, images=40) if quick else Work()
    rows: list[Row] = []
    for epochs, repeats in ((1, 1),) if quick else ((10, 3), (1, 7)):
        federation = Federation(replace(usual, epochs=epochs), PFedLA(), test_images=TEST_IMAGES)
        took = in_turns({"round": federation.round, "evaluation": federation.evaluate}, repeats)
        federation.close()
        rows.append(
            {
                "local epochs": epochs,
                "round, s": round(took["round"], 3),
                "evaluation, s": round(took["evaluation"], 4),
                "images/s": round(2 * TEST_IMAGES * usual.clients / took["evaluation"]),
                "added by evaluating every round, %": round(100 * took["evaluation"] / took["round"], 1),
            }
        )
    return rows
