"""Options of the command line that mirror the configuration, and messages that name them."""

from __future__ import annotations

import re
import sys

from pfedla.algorithms import ALGORITHMS
from pfedla.data.datasets import DATASETS
from pfedla.data.splits import SPLITS
from pfedla.models import MODELS

__all__ = ["DATA_OPTIONS", "METHOD_OPTION", "RUN_OPTIONS", "stopped", "with_options"]

DATA_OPTIONS: tuple[tuple[str, str, type, str], ...] = (  # option, where its value belongs, its type, help
    ("dataset", "data.dataset", str, f"One of {', '.join(DATASETS)}."),
    ("folder", "data.folder", str, "Own data: a folder with one .npz (x, y) per client, or one .npz (x, y, client)."),
    ("data-dir", "machine.data_dir", str, "Where data sets lie; $PFEDLA_DATA by default."),
    ("split", "split.name", str, f"One of {', '.join(sorted(set(SPLITS) - {'column'}))}."),
    ("clients", "data.clients", int, "How many clients there are."),
    ("samples-per-client", "data.samples_per_client", int, "A client's training and test samples together."),
    ("test-samples-per-client", "data.test_samples_per_client", int, "Test each client on this many samples instead."),
    ("validation", "data.validation", float, "Score on this share of the training samples, held out, and not on test."),
    ("seed", "schedule.seed", int, "Decides every random number."),
)
METHOD_OPTION = (("algorithm", "algorithm.name", str, f"{', '.join(ALGORITHMS)}, or package.module:Class."),)
RUN_OPTIONS: tuple[tuple[str, str, type, str], ...] = (
    ("model", "model.name", str, f"auto, {', '.join(MODELS)}, or package.module:factory."),
    ("rounds", "schedule.rounds", int, "How many rounds to run."),
    ("participants", "schedule.participants", int, "How many clients take part in a round; all by default."),
    ("local-epochs", "training.local_epochs", int, "Epochs a client trains in a round."),
    ("batch-size", "training.batch_size", int, "Samples in a mini-batch."),
    ("lr", "training.lr", float, "The clients' learning rate."),
    ("eval-every", "schedule.eval_every", int, "Rounds between evaluations."),
    ("workers", "machine.workers", int, "Processes; one per core by default. Never changes the result."),
)


def stopped(overwrite: bool) -> str:
    """Return what to tell who has stopped several runs."""
    if not overwrite:
        return "stopped. Give the same command again to resume"
    return (
        "stopped. Without --overwrite the same command resumes what was under way and leaves the rest as it is; with "
        "it everything is run anew"
    )


def with_options(text: str) -> str:
    """Return a message and, in brackets, the options of the command given that stand for the settings it names.

    Options that the message has already, as one from another process of ours may, are not named again.
    """
    options = DATA_OPTIONS if sys.argv[1:2] == ["data"] else (*METHOD_OPTION, *DATA_OPTIONS, *RUN_OPTIONS)
    if sys.argv[1:2] == ["paper"]:
        options = tuple(option for option in DATA_OPTIONS if option[0] == "data-dir")
    addresses = [(address, f"--{name}") for name, address, _, _ in options]
    addresses += [(f"codec.{key}", "--codec") for key in ("up", "down", "keep")]
    out = "--runs" if sys.argv[1:2] == ["paper"] else "--out"
    addresses += [("machine.track", "--track"), ("machine.download", "--download")]
    addresses += [("(out)", out), ("overwrite it", "--overwrite")]
    words = {*re.findall(r"[a-z_]+\.[a-z_]+", text), *re.findall(r"\(out\)|overwrite it", text)}
    named = re.findall(r"--[a-z-]+", text)
    found = dict.fromkeys(option for address, option in addresses if address in words and option not in named)
    return text.replace(" (out)", "") + (f" ({', '.join(found)})" if found else "")
