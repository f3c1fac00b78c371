"""Reading one metric of a process, vLLM's or the gateway's."""

import httpx


async def metric(url: str, name: str, **labels: str) -> float:
    """The sum of the samples called `name` with these labels; 0 where there is none."""
    async with httpx.AsyncClient(trust_env=False, timeout=30) as http:
        lines = (await http.get(f"{url}/metrics")).text.splitlines()
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    samples = [line for line in lines if line.startswith((f"{name}{{", f"{name} ")) and all(w in line for w in wanted)]
    return sum(float(line.rpartition(" ")[2]) for line in samples)
