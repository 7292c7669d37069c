"""pFedLA: personalized federated learning with layer-wise aggregation.

::

    import pfedla

    result = pfedla.run(pfedla.PFedLA(retain=1), make_model, clients=[(x, y), ...], rounds=50)
    result.summary["accuracy_mean"], result.alpha, result.model(3)
"""

from __future__ import annotations

import sys

if sys.version_info < (3, 11):  # noqa: UP036  (a checkout may meet any Python)
    raise ImportError("pfedla needs Python 3.11 or newer; this is " + sys.version.split()[0])

from pfedla.algorithm import Algorithm
from pfedla.algorithms import *  # noqa: F403  (every method)
from pfedla.algorithms import __all__ as _methods
from pfedla.codec import Codec
from pfedla.config import Experiment
from pfedla.data.datasets import load_dataset
from pfedla.errors import PfedlaError
from pfedla.experiment import load, resume, run, run_experiment
from pfedla.layers import Layers, LayerSpec
from pfedla.modelfile import load_model
from pfedla.newcomer import join
from pfedla.objective import Binary, Classification, Custom, MultiLabel, Objective, PerPosition, Regression
from pfedla.privacy import Privacy
from pfedla.record import RunRecord
from pfedla.result import Result
from pfedla.rounds import Progress
from pfedla.trackers import Tracker
from pfedla.training import Task, Training
from pfedla.version import __version__
from pfedla.wire import Payload

__all__ = [
    *_methods,
    "Algorithm",
    "Binary",
    "Classification",
    "Codec",
    "Custom",
    "Experiment",
    "LayerSpec",
    "Layers",
    "MultiLabel",
    "Objective",
    "Payload",
    "PerPosition",
    "PfedlaError",
    "Privacy",
    "Progress",
    "Regression",
    "Result",
    "RunRecord",
    "Task",
    "Tracker",
    "Training",
    "__version__",
    "join",
    "load",
    "load_dataset",
    "load_model",
    "resume",
    "run",
    "run_experiment",
]
