"""nvidia-smi in a rehearsal: a query of single figures, the topology, or a line for each device."""

import sys

import pynvml

NUMBERS = {  # of --query-gpu: the figure and its unit
    "count": lambda device: (pynvml.nvmlDeviceGetCount(), ""),
    "index": lambda device: (pynvml.nvmlDeviceGetIndex(device), ""),
    "name": lambda device: (pynvml.nvmlDeviceGetName(device), ""),
    "uuid": lambda device: (pynvml.nvmlDeviceGetUUID(device), ""),
    "memory.total": lambda device: (_memory(device).total >> 20, " MiB"),
    "memory.used": lambda device: (_memory(device).used >> 20, " MiB"),
    "memory.free": lambda device: (_memory(device).free >> 20, " MiB"),
}


def _memory(device):
    return pynvml.nvmlDeviceGetMemoryInfo(device, pynvml.nvmlMemory_v2)


def main(words: list[str]) -> str:
    pynvml.nvmlInit()
    devices = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())]
    options = dict(word.lstrip("-").split("=", 1) for word in words if "=" in word)
    if words[:2] == ["topo", "-m"]:
        names = [f"GPU{number}" for number in range(len(devices))]
        rows = [[name, *("X" if name == other else "SYS" for other in names)] for name in names]
        return "\n".join("\t".join(row) for row in [["", *names], *rows])
    if chosen := options.get("id") or options.get("i"):
        devices = [device for device in devices if pynvml.nvmlDeviceGetUUID(device) == chosen]
    asked = options.get("query-gpu", "index,name,memory.used,memory.total").split(",")
    bare = "nounits" in options.get("format", "")
    rows = [[NUMBERS[name.strip()](device) for name in asked] for device in devices]
    return "\n".join(", ".join(f"{value}{'' if bare else unit}" for value, unit in row) for row in rows)


if __name__ == "__main__":
    print(main(sys.argv[1:]))
