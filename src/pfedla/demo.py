"""The demonstration: clients in hidden groups, with few images each.

This is what pFedLA is for. A client alone has too little data; one model for everybody fits nobody; the right
company has to be found, and found layer by layer.
"""

from __future__ import annotations

from pfedla.config import Tables

__all__ = ["DEMO", "DEMO_METHODS"]

DEMO: Tables = {
    "data": {
        "dataset": "fashion-mnist-10k",
        "clients": 12,
        "samples_per_client": 80,
        "test_samples_per_client": 200,
    },
    "split": {"name": "groups", "groups": 4, "classes_per_client": 4},
    "model": {"name": "lenet-bn"},
    "training": {"local_epochs": 2, "lr": 0.01},
    "schedule": {"rounds": 100, "eval_every": 5},
}
DEMO_METHODS = ["local", "fedavg", "pfedla", "heurpfedla"]
