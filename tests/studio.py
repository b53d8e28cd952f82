# One widget of each kind, each in a cell of its own: what test_browser.py opens in a browser.
# ruff: noqa: E402

# %%
from perf_helpers import Lab, exercises, explorers, monitor, widgets

lab = Lab(profile="tiny", lesson="00_studio")

# %%
widgets.predict(lab, "peak", "The peak?", "MB", 0, 100)

# %%
vanilla = lab.train("vanilla", per_device_train_batch_size=4)
half = lab.train("half", per_device_train_batch_size=2, gradient_accumulation_steps=2)

# %%
widgets.revealed(lab, "peak", vanilla.peak_bytes / 1e6)

# %%
answer = None

# %%
exercises.challenge(lab, "small", answer, baseline=vanilla, limit_bytes=0.9 * vanilla.peak_bytes)

# %%
explorers.memory(lab)

# %%
explorers.timeline(vanilla, half)

# %%
explorers.recipes(lab)

# %%
import time

with monitor.live():
    time.sleep(4)

# %%
options = {"activations": "Half as many live at once.", "weights": "They stay as they are."}
exercises.question(lab, "why", "What does `half` save?", options, right="activations")

# %%
from IPython.display import display

display(
    exercises.hint("First `x`.", "Then `y`."),
    exercises.wrong("of `x`"),
    exercises.right("yes"),
    exercises.board(lab, "small"),
)

# %%
from perf_helpers import plots


def draw(rank, bits):
    return plots.lines([1, 2], {"frozen": [rank, bits], "learnt": [bits, rank]}, "rank", "GB")


_ = widgets.explore(draw, rank=[1, 2], bits=[16, 4])

# %%
import threading

own_names = ("perf_helpers", "explorer", "live monitor")
print("threads:", [thread.name for thread in threading.enumerate() if any(word in thread.name for word in own_names)])
