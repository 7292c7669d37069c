"""What a finished run is good for: its clients one by one, predictions on new inputs, models in other formats."""

from __future__ import annotations

import csv
import importlib.util
import io
import logging
import math
import re
import warnings
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from pfedla.errors import ConfigError, DataError, RunError
from pfedla.experiment import load
from pfedla.modelfile import Description, check_file, save_model
from pfedla.objective import OBJECTIVES, Classification, Objective
from pfedla.record import RunRecord
from pfedla.report.clients import client_rows
from pfedla.training import EVALUATION_BATCH, Samples, are_pixels

__all__ = ["FORMATS", "Predictions", "Standing", "export", "numbered", "predict", "standing"]

FORMATS = ("state-dict", "torchscript", "onnx")
Format = Literal["state-dict", "torchscript", "onnx"]


class Standing(NamedTuple):
    """How a run's clients stand after its latest evaluation."""

    rows: list[dict[str, Any]]  # one for each client
    t: int  # the round
    headline: str
    higher_is_better: bool
    percent: bool
    scored_on: str


def standing(path: Path | str) -> Standing:
    """Read how every client of a run, complete or not, stands after its latest evaluation."""
    record = RunRecord(path)
    if not record.exists:
        raise RunError(f"{record.path} holds no run")
    history, facts = record.history(), record.facts()
    if not history:
        raise RunError(f"the run in {record.path} has not been evaluated yet")
    settings = facts.get("settings", {})
    table = settings.get("objective", {})
    kind: Any = OBJECTIVES.get(table.get("name"))
    metrics = history[-1].get("clients") or {}
    headline = table.get("headline", kind.headline if kind else next(iter(metrics), "loss"))
    up, percent = (table.get(key, getattr(kind, key, False)) for key in ("higher_is_better", "percent"))
    scored_on = "test" if settings.get("data", {}).get("validation") is None else "validation"
    try:
        rows = client_rows(facts["names"], facts["samples"], history[-1], scored_on)
        return Standing(rows, int(history[-1]["round"]), headline, bool(up), bool(percent), scored_on)
    except (LookupError, TypeError) as error:
        raise RunError(f"{record.path} is damaged or of an earlier version: {error!r}") from error


class Predictions(NamedTuple):
    """What a client's model says of new inputs."""

    columns: dict[str, list[Any]]  # by name, a value for each input
    metrics: dict[str, float]  # if the targets are known, else none
    recalls: dict[str, tuple[float, int]]  # of each class among known targets, with its number of samples

    def csv(self) -> str:
        """Return them as CSV, a line for each input, numbered from 0."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["sample", *self.columns])
        writer.writerows(zip(range(len(next(iter(self.columns.values())))), *self.columns.values(), strict=True))
        return text.getvalue()


def predict(
    path: Path | str,
    client: int | str,
    x: np.ndarray,
    y: np.ndarray | None = None,
    *,
    model: Any = None,
    probabilities: bool = False,
) -> Predictions:
    """Return what a client's personalized model says of inputs like those it was trained on, and how well, given `y`.

    `model` makes the module of a run that was started from Python. With `probabilities` there is a column for each
    class. Of known classes there is also the recall, and its mean as `accuracy_balanced`: what rare classes count for.
    """
    result, facts = load(path, model), RunRecord(path).facts()
    module, shape = result.model(client), tuple(facts["shape"])
    if facts.get("data") and tuple(x.shape[1:]) != shape:  # a deployment does not know it
        raise DataError(f"inputs must have the shape {('samples', *shape)}, not {tuple(x.shape)}".replace("'", ""))
    if "pixels" in facts and are_pixels(x) != facts["pixels"]:
        wanted = "images of type uint8" if facts["pixels"] else "no images of bytes"
        raise DataError(f"the model was trained on {wanted}, and the inputs are {x.dtype}: give what it knows")
    classes: list[str] = facts.get("classes", [])
    targets = None if y is None else numbered(y, classes)
    try:
        outputs = _outputs(module, Samples(x, np.zeros(len(x), np.int64)))
    except RuntimeError as error:
        raise DataError(f"the model cannot take inputs of type {x.dtype}: {str(error).partition(chr(10))[0]}") from None
    objective = _objective(facts)
    if probabilities and not isinstance(objective, Classification):
        raise ConfigError("there are probabilities of classes only where a run was trained for classification")
    if objective is None:
        return Predictions(_columns({"output": outputs}, []), {}, {})
    metrics: dict[str, float] = {}
    recalls: dict[str, tuple[float, int]] = {}
    if targets is not None:
        known = Samples(x, targets).targets
        objective.check(outputs, known)
        ratios = objective.measure(outputs, known)
        means = {name: float(above) / float(below) if below else math.nan for name, (above, below) in ratios.items()}
        metrics = objective.finish(means)
        if isinstance(objective, Classification):
            right = outputs.argmax(1) == known
            of = {int(place): right[known == place] for place in known.unique()}
            recalls = {_name(classes, place): (float(own.double().mean()), len(own)) for place, own in of.items()}
            metrics["accuracy_balanced"] = fmean(recall for recall, _ in recalls.values())
    columns = _columns(objective.predictions(outputs), classes)
    if probabilities:
        shares = outputs.double().softmax(1).T.tolist()
        columns |= {f"probability_{_name(classes, place)}": share for place, share in enumerate(shares)}
    return Predictions(columns, metrics, recalls)


@torch.inference_mode()
def _outputs(module: nn.Module, samples: Samples) -> Tensor:
    like = next(module.parameters())
    starts = range(0, len(samples), EVALUATION_BATCH)
    return torch.cat([module(samples.take(slice(i, i + EVALUATION_BATCH), like)[0]).cpu() for i in starts])


def _objective(facts: dict[str, Any]) -> Objective | None:
    """Return what a run was trained for; None if it is somebody's own."""
    table = dict(facts.get("settings", {}).get("objective", {}))
    kind = OBJECTIVES.get(table.pop("name", None))
    return kind(**table) if kind else None


def numbered(y: np.ndarray, classes: list[str]) -> np.ndarray:
    """Return targets as the model was trained on them: the numbers of classes, where they are labels.

    Whole numbers are numbers of classes as well, where classes have names of other kinds, "Trouser" say.
    """
    if not classes:
        return y
    if y.ndim != 1:
        raise DataError(f"there must be one label for each sample, in one dimension, not {y.shape}")
    number = {name: place for place, name in enumerate(classes)}
    if y.dtype.kind in "iu" and not all(re.fullmatch(r"-?\d+", name) for name in classes):
        number = {str(place): place for place in range(len(classes))}
    if strange := {str(label) for label in np.unique(y).tolist()} - number.keys():
        raise DataError(f"label {sorted(strange)[0]} is none of the classes {', '.join(classes[:10])}")
    return np.array([number[str(label)] for label in y.tolist()], np.int64)


def _columns(found: dict[str, Tensor], classes: list[str]) -> dict[str, list[Any]]:
    """Return tensors `(n, ...)` as columns, one for each value of a sample; classes by name."""
    columns: dict[str, list[Any]] = {}
    for name, tensor in found.items():
        flat = tensor.flatten(1) if tensor.dim() > 1 else tensor[:, None]
        for place, values in enumerate(flat.T.tolist()):
            heading = name if flat.shape[1] == 1 else f"{name}_{place}"
            named = classes and name == "prediction"  # a model may have more outputs than the data classes
            columns[heading] = [_name(classes, value) for value in values] if named else values
    return columns


def _name(classes: list[str], place: int) -> str:
    return classes[place] if place < len(classes) else str(place)


def export(
    path: Path | str, client: int | str, out: Path | str, form: Format = "state-dict", *, model: Any = None
) -> Description:
    """Write a client's personalized model to a file, for use without this library; return what there is to know of it.

    Parameters
    ----------
    path
        The run's folder.
    client
        Whose model, by number or name.
    out
        The file to write.
    form
        `"state-dict"`: safetensors, with what rebuilds the model in the header. `"torchscript"`: for `torch.jit.load`,
        in Python or C++. `"onnx"`: for ONNX runtimes, any number of inputs at once; needs the extra `pfedla[onnx]`.
    model
        Makes the module of a run that was started from Python.
    """
    if form not in FORMATS:
        raise ConfigError(f"unknown format {form!r}: choose one of {', '.join(FORMATS)}")
    result, facts = load(path, model), RunRecord(path).facts()
    if form == "onnx" and not facts.get("data"):
        raise ConfigError("a deployment does not know its inputs' shape: load the model and use torch.onnx.export")
    module = result.model(client)
    name = client if isinstance(client, str) else result.names[client]
    about, file = Description.of(facts, name, result.spec.names if result.spec else ()), Path(out)
    check_file(file)
    try:
        if form == "state-dict":
            save_model(file, module, about)
        elif form == "torchscript":
            _script(module).save(str(file))
        else:
            _write_onnx(module, about, file)
    except (OSError, SafetensorError, RuntimeError) as error:
        raise RunError(f"cannot write to {file}: {str(error).partition(chr(10))[0]}") from error
    return about


def _script(module: nn.Module) -> Any:
    """Return a module as TorchScript."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch would rather have us use something else
        try:
            return torch.jit.script(module)
        except Exception as error:  # whatever its code brings up
            text = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
            raise ConfigError(f"this model cannot be written as TorchScript: {text.strip()}") from error


def _write_onnx(module: nn.Module, about: Description, file: Path) -> None:
    """Write a module as ONNX, for batches of any size."""
    if any(importlib.util.find_spec(name) is None for name in ("onnx", "onnxscript")):
        raise ConfigError("ONNX needs further packages: pip install 'pfedla[onnx]'")
    like = next(module.parameters())
    example = torch.zeros(2, *about.shape, dtype=like.dtype)
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # it misses packages that we do not use
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            torch.onnx.export(
                module,
                (example,),
                str(file),
                input_names=["x"],
                output_names=["outputs"],
                dynamic_shapes=({0: torch.export.Dim("samples")},),
                external_data=False,
                verbose=False,
                dynamo=True,
            )
        except OSError:
            raise
        except Exception as error:  # whatever its code brings up
            text = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
            raise ConfigError(f"this model cannot be written as ONNX: {text.strip()}") from error
        finally:
            logging.disable(before)
