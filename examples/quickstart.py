"""Six clients; 0 and 1, 2 and 3, 4 and 5 hold the same kinds of clothes, and nobody tells the server."""

import numpy as np
from torch import nn

import pfedla

data = pfedla.load_dataset("fashion-mnist-10k")  # embedded; any (x, y) will do
kinds = [(0, 2, 4, 6), (1, 3, 5, 7), (2, 5, 8, 9)]
mine = [np.flatnonzero(np.isin(data.y, kinds[i // 2]))[i % 2 :: 2][:100] for i in range(6)]


def make_model() -> nn.Module:
    """Return the common first model: any torch module."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))


result = pfedla.run(pfedla.PFedLA(retain=1), make_model, [(data.x[i], data.y[i]) for i in mine], rounds=40)
print(f"accuracy {result.summary['accuracy_mean']:.3f}, worst client {result.summary['accuracy_worst']:.3f}")
assert result.alpha is not None  # (evaluated rounds, clients, layers, clients)
print("client 3 mixes its last layer from", result.alpha[-1, 3, -1].round(2))
model = result.model(3)  # a torch module, ready to use
