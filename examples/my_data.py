"""Your own data: one .npz file (x, y) for each client, then one command or one call."""

import tempfile
from pathlib import Path

import numpy as np

import pfedla

rng = np.random.default_rng(0)
folder = Path(tempfile.mkdtemp()) / "hospitals"
folder.mkdir()
for site in range(4):  # 20 measurements per patient; two sites of a kind
    kind = np.linspace(-1, 1, 20) * (1 if site < 2 else -1)
    x = rng.normal(size=(200, 20)).astype(np.float32)
    np.savez(folder / f"site-{site}.npz", x=x, y=(x @ kind > 0).astype(np.int64))

# The same from a shell:  pfedla run --folder hospitals --model mlp --rounds 40
experiment = pfedla.Experiment.from_tables(
    {"data": {"folder": str(folder)}, "model": {"name": "mlp"}, "schedule": {"rounds": 40}, "training": {"lr": 0.05}}
)
result = pfedla.run_experiment(experiment, out=folder.parent / "run")
print(f"accuracy {result.summary['accuracy_mean']:.3f}; models in {folder.parent / 'run' / 'models'}")
