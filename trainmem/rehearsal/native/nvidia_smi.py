"""nvidia-smi in a rehearsal: print queried properties, the topology, or a line per device."""

import sys

import pynvml

PLAIN = {  # properties of --query-gpu, in addition to memory.total, memory.used and memory.free
    "count": lambda _: pynvml.nvmlDeviceGetCount(),
    "index": pynvml.nvmlDeviceGetIndex,
    "name": pynvml.nvmlDeviceGetName,
    "uuid": pynvml.nvmlDeviceGetUUID,
    "driver_version": lambda _: pynvml.nvmlSystemGetDriverVersion(),
}
AT_REST = ("utilization.", "temperature.", "power.", "clocks.")  # figures of a device that computes nothing: 0


def figure(device, name: str, unit: str) -> str:
    if name in PLAIN:
        return str(PLAIN[name](device))
    if name.startswith(AT_REST):
        return "0"
    memory = pynvml.nvmlDeviceGetMemoryInfo(device, pynvml.nvmlMemory_v2)
    size = getattr(memory, name.removeprefix("memory."), None)
    return "[N/A]" if size is None else f"{size >> 20}{unit}"


def main(words: list[str]) -> str:
    pynvml.nvmlInit()
    devices = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())]
    if words[:2] == ["topo", "-m"]:
        names = [f"GPU{number}" for number in range(len(devices))]
        rows = [[name, *("X" if name == other else "SYS" for other in names)] for name in names]
        return "\n".join("\t".join(row) for row in [["", *names], *rows])
    options = dict(word.lstrip("-").split("=", 1) for word in words if "=" in word)
    if chosen := options.get("id") or options.get("i"):
        devices = [device for device in devices if pynvml.nvmlDeviceGetUUID(device) == chosen]
    names = options.get("query-gpu", "index,name,memory.used,memory.total").split(",")
    unit = "" if "nounits" in options.get("format", "") else " MiB"
    return "\n".join(", ".join(figure(device, name.strip(), unit) for name in names) for device in devices)


if __name__ == "__main__":
    print(main(sys.argv[1:]))
