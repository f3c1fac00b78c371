"""The peer of `suite/rows/local.py`: Mosec serving an MLP 128-512-512-10, batches of up to 32, 2 ms of delay.

On one CPU thread, in an environment of its own (`make bench-peers`); options are Mosec's (`--port`, `--address`).
Body: a JSON list of 128 numbers; answer: a JSON list of 10.
"""

import torch
from mosec import Server, Worker


class Mlp(Worker):
    def __init__(self):
        torch.set_num_threads(1)
        torch.manual_seed(0)
        nn = torch.nn
        network = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
        self._network = torch.jit.script(network.eval())

    def forward(self, data):
        with torch.inference_mode():
            return self._network(torch.tensor(data, dtype=torch.float32)).tolist()


if __name__ == "__main__":
    server = Server()
    server.append_worker(Mlp, num=1, max_batch_size=32, max_wait_time=2)
    server.run()
