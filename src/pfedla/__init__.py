"""pFedLA: personalized federated learning with layer-wise aggregation.

::

    import pfedla

    result = pfedla.run(pfedla.PFedLA(retain=1), make_model, clients=[(x, y), ...], rounds=50)
    result.summary["accuracy_mean"], result.alpha, result.model(3)
"""

from __future__ import annotations

from pfedla.algorithm import Algorithm
from pfedla.algorithms import (
    ALGORITHMS,
    APFL,
    Ditto,
    FedALA,
    FedAMP,
    FedAvg,
    FedAvgFT,
    FedBN,
    FedFomo,
    FedPer,
    FedProx,
    FedRep,
    HeurPFedLA,
    LGFedAvg,
    Local,
    PerFedAvg,
    PFedHN,
    PFedLA,
    PFedLAPeers,
    PFedMe,
    Scaffold,
    SimilarityLayer,
    SimilarityModel,
)
from pfedla.config import Experiment
from pfedla.data.datasets import load_dataset
from pfedla.errors import PfedlaError
from pfedla.experiment import load, resume, run, run_experiment
from pfedla.layers import Layers, LayerSpec
from pfedla.objective import Binary, Classification, Custom, MultiLabel, Objective, PerPosition, Regression
from pfedla.record import RunRecord
from pfedla.result import Result
from pfedla.rounds import Progress
from pfedla.training import Task, Training
from pfedla.version import __version__
from pfedla.wire import Payload

__all__ = [
    "ALGORITHMS",
    "APFL",
    "Algorithm",
    "Binary",
    "Classification",
    "Custom",
    "Ditto",
    "Experiment",
    "FedALA",
    "FedAMP",
    "FedAvg",
    "FedAvgFT",
    "FedBN",
    "FedFomo",
    "FedPer",
    "FedProx",
    "FedRep",
    "HeurPFedLA",
    "LGFedAvg",
    "LayerSpec",
    "Layers",
    "Local",
    "MultiLabel",
    "Objective",
    "PFedHN",
    "PFedLA",
    "PFedLAPeers",
    "PFedMe",
    "Payload",
    "PerFedAvg",
    "PerPosition",
    "PfedlaError",
    "Progress",
    "Regression",
    "Result",
    "RunRecord",
    "Scaffold",
    "SimilarityLayer",
    "SimilarityModel",
    "Task",
    "Training",
    "__version__",
    "load",
    "load_dataset",
    "resume",
    "run",
    "run_experiment",
]
