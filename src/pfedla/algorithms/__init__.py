"""The methods, by the names that configuration files and the command line use."""

from __future__ import annotations

from typing import Any

from pfedla.algorithm import Algorithm
from pfedla.algorithms.apfl import APFL
from pfedla.algorithms.clustered import Clustered
from pfedla.algorithms.ditto import Ditto
from pfedla.algorithms.fedala import FedALA
from pfedla.algorithms.fedamp import FedAMP
from pfedla.algorithms.fedavg import FedAvg, Local
from pfedla.algorithms.fedavg_ft import FedAvgFT
from pfedla.algorithms.fedbn import FedBN
from pfedla.algorithms.fedfomo import FedFomo
from pfedla.algorithms.fedper import FedPer
from pfedla.algorithms.fedprox import FedProx
from pfedla.algorithms.fedrep import FedRep
from pfedla.algorithms.lgfedavg import LGFedAvg
from pfedla.algorithms.perfedavg import PerFedAvg
from pfedla.algorithms.pfedhn import PFedHN
from pfedla.algorithms.pfedla import HeurPFedLA, PFedLA
from pfedla.algorithms.pfedla_peers import PFedLAPeers
from pfedla.algorithms.pfedla_x import PFedLAX
from pfedla.algorithms.pfedla_x_peers import PFedLAXPeers
from pfedla.algorithms.pfedme import PFedMe
from pfedla.algorithms.scaffold import Scaffold
from pfedla.algorithms.similarity import SimilarityLayer, SimilarityModel

__all__ = [
    "ALGORITHMS",
    "APFL",
    "Clustered",
    "Ditto",
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
    "Local",
    "PFedHN",
    "PFedLA",
    "PFedLAPeers",
    "PFedLAX",
    "PFedLAXPeers",
    "PFedMe",
    "PerFedAvg",
    "Scaffold",
    "SimilarityLayer",
    "SimilarityModel",
]

ALGORITHMS: dict[str, type[Algorithm[Any]]] = {
    "local": Local,
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "fedavg-ft": FedAvgFT,
    "clustered": Clustered,
    "fedbn": FedBN,
    "fedper": FedPer,
    "lg-fedavg": LGFedAvg,
    "fedrep": FedRep,
    "per-fedavg": PerFedAvg,
    "pfedme": PFedMe,
    "ditto": Ditto,
    "apfl": APFL,
    "scaffold": Scaffold,
    "pfedhn": PFedHN,
    "fedfomo": FedFomo,
    "fedamp": FedAMP,
    "fedala": FedALA,
    "similarity-model": SimilarityModel,
    "similarity-layer": SimilarityLayer,
    "pfedla": PFedLA,
    "heurpfedla": HeurPFedLA,
    "pfedla-peers": PFedLAPeers,
    "pfedla-x": PFedLAX,
    "pfedla-x-peers": PFedLAXPeers,
}
