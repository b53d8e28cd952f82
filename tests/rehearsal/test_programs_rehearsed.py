"""Whole programs under `rehearsal.run`. These tests need torch's CUDA build (make wheel) and a compiler."""

import dataclasses
import json
import os
import signal
import subprocess
import sys

import pytest
import torch

from trainmem import rehearsal
from trainmem.rehearsal import CARDS, Rehearsal, build

if build.problem() or build.interpreter() is None:
    pytest.skip("torch's CUDA build is not here: make wheel", allow_module_level=True)


@pytest.fixture
def program(tmp_path, monkeypatch, capfd):
    """Return a function that rehearses a program, given as text, in a folder of its own, and returns its run and its
    output.
    """
    monkeypatch.chdir(tmp_path)

    def rehearsed(text, *words, card="t4", **options):
        (tmp_path / "program.py").write_text(text)
        chosen = CARDS[card] if isinstance(card, str) else card
        run = rehearsal.run(["python", "program.py", *words], chosen, **options)
        return run, capfd.readouterr()

    return rehearsed


TRAINING = """
import torch
model = torch.nn.Linear(1024, 1024).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(2):
    model(torch.randn(256, 1024, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    before = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() < before
with torch.no_grad():
    loss = model(torch.randn(512, 1024, device="cuda")).mean()
print("peak", before)
"""


def test_a_program_that_needs_a_value_ends_with_its_peaks_and_its_line(program):
    run, printed = program(TRAINING + "if loss > 0:\n    print('never')\n")
    assert (run.status, run.exit_code) == ("needs values", 3)
    (process,) = run.processes
    assert process["steps"] == 2 and process["error"]["line"].endswith("line 15, in <module>: if loss > 0:")
    assert [*process["phases"]] == [
        "set-up",
        "forward pass",
        "backward pass",
        "optimizer update",
        "between steps",
        "evaluation and generation",
    ]
    (own,) = (int(line.split()[1]) for line in printed.out.splitlines() if line.startswith("peak"))
    assert max(allocated for allocated, _ in process["phases"].values()) == own


ANSWERED = """
import json, math, numpy, torch
scores = torch.randn(4, 50, device="cuda")
loss = scores.mean()
found = [loss.item() < 1, loss.item() > 1, bool(loss > 1), not (loss != loss), bool(torch.isnan(loss)), float(loss)]
assert found == [False, False, False, True, False, 1.0], found
assert math.isfinite(loss.item()) and math.exp(loss) == math.e and int(loss) == 1
assert torch.isfinite(torch.tensor(loss.item())) and numpy.isfinite(loss.cpu().numpy())
assert scores.argmax(-1).tolist() == [0] * 4 and scores.topk(3).indices.tolist() == [[0, 1, 2]] * 4
assert scores.sort(dim=0).indices[:, 7].tolist() == [0, 1, 2, 3]
assert (scores > 0).sum().item() == 0 and (~(scores > 0)).sum().item() == 200, "answers agree with each other"
assert scores[scores > 0].shape == (0,) and torch.nonzero(scores > 0).shape == (0, 2)
assert (scores.argmax(1) == torch.zeros(4, dtype=torch.long, device="cuda")).sum().item() == 4
assert not torch.equal(scores, scores) and not torch.allclose(scores, scores) and 3.0 not in scores
assert torch.unique(scores).tolist() == [1.0] and torch.unique(scores.argmax(1)).tolist() == [0]
assert len(scores.tolist()) == 4 and scores.cpu().numpy().shape == (4, 50)
assert float(f"{float(loss):.4f}") == 1 and json.loads(json.dumps({"loss": loss.item()}, indent=2)) == {"loss": 1.0}
assert torch.multinomial(scores.softmax(-1), 1).flatten().tolist() == [0] * 4
best = float("inf")
assert loss.item() < best and loss < best and not (scores > best).any(), "an assumed number is finite"
best = loss.item()
if loss.item() < best:
    raise AssertionError("a comparison with an assumed number is false")
print("to its end")
"""


@pytest.mark.nightly
def test_with_assumed_values_a_program_reaches_its_end_and_the_answers_are_counted(program):
    run, printed = program(ANSWERED, assumes=True)
    assert run.status == "finished" and "to its end" in printed.out, repr(run)
    (process,) = run.processes
    for kind in ("floating-point values read", "comparisons of an assumed number", "positions chosen", "sizes that"):
        assert sum(count for name, count in process["answers"].items() if kind in name) > 0, kind
    assert "--assume" in repr(run)


@pytest.mark.nightly
def test_one_rule_says_whether_an_unknown_number_is_finite(program):
    text = "import math, torch\nloss = torch.randn(9, device='cuda').mean()\n"
    text += "assert math.isfinite(loss.item()) and not math.isnan(loss.item()) and torch.isfinite(loss)\n"
    text += "stored = torch.tensor([loss.item(), 1.0])\nprint('yes' if stored.max() > 3 else 'no')"
    run, printed = program(text)
    assert run.status == "needs values" and "stored.max()" in run.processes[0]["error"]["line"], printed.err


CHECKED = """
import torch
from torch import distributions
boxes = torch.randn(400, 4, device="cuda")
def is_valid(boxes):
    return bool((boxes[:, 2:] >= boxes[:, :2]).all())
torch._assert((boxes >= 0).all(), "negative")  # torch checks it, not this program
print("checked")
if not is_valid(boxes):
    raise ValueError("no boxes")
assert torch.allclose(boxes, boxes + 1) and (boxes.abs() < 3).all().item(), f"far from it: {boxes}"
assert boxes.mean().item() < 5 and not (boxes > 3).any()
chosen = "yes" if (boxes > 0).all() else "no"
counts = torch.tensor([1, 2], device="cuda")
try:
    assert counts.sum() == 4
    raise SystemExit("a known value that is wrong was accepted")
except AssertionError:
    print(chosen)
"""


@pytest.mark.nightly
def test_a_check_of_unknown_values_is_passed_if_a_library_makes_it_or_values_are_assumed(program):
    run, printed = program(CHECKED)
    assert run.status == "needs values" and printed.out == "checked\n", printed.err
    assert "return bool(" in run.processes[0]["error"]["line"]
    run, printed = program(CHECKED, assumes=True)
    assert run.status == "finished" and printed.out == "checked\nno\n", printed.err
    assert run.processes[0]["answers"]["checks, passed"] == 6


MASKS = """
import torch
lengths = torch.tensor([3, 500], device="cuda")
mask = (torch.arange(600, device="cuda") < lengths[:, None]).long()
whole = torch.cat((torch.ones(2, 8, device="cuda"), mask), 1)  # as peft does for virtual tokens
assert whole.dtype == torch.float32 and whole.sum() == 519 and not whole.all() and whole.bool()[1, :508].all()
scores, targets = torch.randn(12000, 1, device="cuda"), torch.zeros(12000, dtype=torch.long, device="cuda")
def peak(*inputs, **named):
    torch.cuda.reset_peak_memory_stats()
    torch.nn.functional.cross_entropy(*inputs, weight=torch.ones(1, device="cuda"), label_smoothing=0.1, **named)
    return torch.cuda.max_memory_allocated()
whole = peak(scores, targets)
targets[:8000] = -100
assert whole - peak(scores, target=targets) > 8000 * 8, "the loss selects the targets that count"
"""


@pytest.mark.nightly
def test_masks_of_floating_point_numbers_and_those_inside_a_loss_are_known(program):
    run, printed = program(MASKS)
    assert run.status == "finished", printed.err


MONITORED = """
import subprocess, torch
layers = torch.nn.Linear(8, 8).cuda(), torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD([{"params": each.parameters()} for each in layers], 0.1)
groups = optimizer.param_groups
for step in range(3):
    sum(layer(torch.randn(2, 8, device="cuda")).sum() for layer in layers).backward()
    for group in groups:  # as DeepSpeed does
        optimizer.param_groups = [group]
        optimizer.step()
print(torch.cuda.utilization(), torch.cuda.temperature(), torch.cuda.power_draw(), torch.cuda.clock_rate())
query = "--query-gpu=utilization.gpu,temperature.gpu,memory.used,serial"
print(subprocess.run(["nvidia-smi", query, "--format=csv,noheader,nounits"], capture_output=True, text=True).stdout)
class Strange(Exception):
    def __eq__(self, other):
        return self.code == other.code
try:
    raise KeyError("first")
except KeyError:
    raise Strange("====\\nsecond (see above):\\nno module")
"""


@pytest.mark.nightly
def test_updates_are_counted_once_per_step_a_monitor_reads_zeros_and_any_error_is_reported(program):
    run, printed = program(MONITORED)
    (process,) = run.processes
    assert process["steps"] == 3 and printed.out.startswith("0 0 0 0\n0, 0, ") and "[N/A]" in printed.out, printed
    assert run.status == "failed" and process["error"]["message"] == "Strange: second (see above): no module"


SAVING = """
import os, sys, torch
from safetensors.torch import save_file, load_file
model = torch.nn.Linear(1024, 1024).cuda()
optimizer = torch.optim.AdamW(model.parameters())
model(torch.randn(2, 1024, device="cuda")).sum().backward()
optimizer.step()
torch.save({"model": model.state_dict(), "step": torch.tensor(7), "random": torch.get_rng_state()}, "new.tmp")
os.replace("new.tmp", "new.pt")
torch.save(model.state_dict(), "old.pt")
save_file(model.state_dict(), "new.safetensors", {"format": "pt"})
save_file(model.state_dict(), "old.safetensors")
torch.save({"epoch": 3}, "plain.pt")
loaded = torch.load("new.pt")
assert loaded["step"] == 7 and loaded["model"]["weight"].shape == (1024, 1024)
torch.set_rng_state(loaded["random"].cpu())
model.load_state_dict(load_file("new.safetensors"))
assert sum(os.stat(name).st_blocks for name in ("new.pt", "new.safetensors")) * 512 < 1 << 20, "written as holes"
"""


@pytest.mark.nightly
def test_saving_writes_no_weights_and_keeps_the_files_that_were_there(program, tmp_path):
    for name in ("old.pt", "old.safetensors"):
        (tmp_path / name).write_text("mine")
    run, printed = program(SAVING)
    assert run.status == "finished", printed.err
    assert {path.name for path in tmp_path.iterdir()} == {"program.py", "old.pt", "old.safetensors", "plain.pt"}
    assert (tmp_path / "old.pt").read_text() == (tmp_path / "old.safetensors").read_text() == "mine"
    assert "2 files or folders of yours" in repr(run)


BUFFERED = """
import io, json, os, pickle, shutil, torch
state = {"weight": torch.randn(300, 300, device="cuda"), "step": 3}
def save(path):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    with open(path, "wb") as file:
        file.write(buffer.getvalue())
save("older.ckpt")
save("draft")
shutil.move("draft", "moved.ckpt")
save("draft")
shutil.move("draft", "older-moved.ckpt")
with open("file.pt", "wb") as file:
    file.write(b"header")
    torch.save(state, file)
with open("notes.pt", "wb") as file:
    torch.save({"step": 3}, file)
with open("state.pkl", "wb") as file:
    pickle.dump(state, file)
assert pickle.load(open("state.pkl", "rb"))["weight"].shape == (300, 300)
with open("notes.pkl", "wb") as file:
    pickle.dump([torch.arange(3)], file)
torch.save(state, "old-format.pt", _use_new_zipfile_serialization=False)
with open("results.json", "w") as file:
    json.dump([1], file)
assert json.load(open("results.json")) == [1]
assert torch.load("older.ckpt")["weight"].shape == (300, 300)
"""


@pytest.mark.nightly
def test_weights_that_are_saved_by_other_ways_are_not_left_and_no_older_file_is_replaced(program, tmp_path):
    for name in ("older.ckpt", "older-moved.ckpt"):
        torch.save({"weight": torch.ones(3)}, tmp_path / name)
        os.utime(tmp_path / name, (0, 0))
    (tmp_path / "results.json").write_text("[]")
    run, printed = program(BUFFERED)
    assert run.status == "finished", printed.err
    left = {"older.ckpt", "older-moved.ckpt", "notes.pt", "notes.pkl", "results.json", "program.py"}
    assert {path.name for path in tmp_path.iterdir()} == left and (tmp_path / "results.json").read_text() == "[]"
    assert all(torch.load(tmp_path / f"{name}.ckpt")["weight"].tolist() == [1] * 3 for name in ("older", "older-moved"))
    assert "3 files or folders of yours" in repr(run)


EVERYDAY = """
import torch
layer = torch.nn.Sequential(torch.nn.LazyLinear(2048)).cuda()
x = torch.ones(2, 2048, device="cuda")
loss = layer(x).mean().item()
torch.testing.assert_close(layer(x), layer(x))
torch.save({"loss": loss, "model": layer.state_dict()}, "last.pt")
print("loaded", torch.load("last.pt")["loss"])
kept = x[torch.rand(2, device="cuda") > 0.5]
"""


@pytest.mark.nightly
def test_lazy_modules_close_tensors_saved_losses_and_masks_of_unknown_values(program):
    run, printed = program(EVERYDAY, assumes=True)
    assert run.status == "finished" and "loaded assumed" in printed.out, printed.err
    assert "selects nothing" in repr(run)


STARTING_OVER = """
import os, pathlib, shutil, torch
if os.path.exists("out"):
    shutil.rmtree("out")
os.makedirs("out/last")
model = torch.nn.Linear(300, 300).cuda()
torch.save(model.state_dict(), "out/last/model.pt")
os.rename("best.pt", "best-before.pt")
torch.save(model.state_dict(), "best.pt")
torch.jit.save(torch.jit.script(model), "script.pt")
example = torch.ones(1, 300, device="cuda")
traced = torch.jit.trace(model, example, check_trace=False)
traced.save("traced.pt")
traced.save("new.pt")
torch.export.save(torch.export.export(model, (example,)), "exported.pt2")
with open("metrics.csv", "a") as file:
    file.write("1,0.5\\n")
for name in os.listdir("."):
    if name.startswith("checkpoint-"):
        pathlib.Path(name, "state.json").unlink()
        os.rmdir(name)
assert not os.path.exists("checkpoint-9") and os.listdir("out") == ["last"]
assert torch.load("best.pt")["weight"].shape == (300, 300) and torch.load("best-before.pt")["weight"].shape == (3,)
"""


@pytest.mark.nightly
def test_a_program_that_deletes_renames_and_appends_leaves_the_users_files_as_they_were(program, tmp_path):
    (tmp_path / "out" / "run1").mkdir(parents=True)
    (tmp_path / "checkpoint-9").mkdir()
    for name in ("out/config.json", "out/run1/model.pt", "checkpoint-9/state.json", "metrics.csv"):
        (tmp_path / name).write_text(name)
        os.utime(tmp_path / name, (0, 0))
    for name in ("script.pt", "traced.pt", "exported.pt2"):
        (tmp_path / name).write_text(name)
        os.utime(tmp_path / name, (0, 0))
    torch.save({"weight": torch.ones(3)}, tmp_path / "best.pt")
    os.utime(tmp_path / "best.pt", (0, 0))
    before = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}
    run, printed = program(STARTING_OVER)
    assert run.status == "finished", printed.err
    after = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}
    after.pop(tmp_path / "program.py")
    assert after == before


@pytest.mark.nightly
def test_uploads_are_refused_and_the_exit_code_is_the_programs_own(program):
    text = "import httpx, torch\ntorch.ones(1).cuda()\nhttpx.post('https://hub.invalid/api/repos/create')"
    run, _ = program(text)
    assert (run.status, run.exit_code) == ("failed", 1) and "push_to_hub" in run.processes[0]["error"]["message"]
    run, _ = program("import sys, torch\ntorch.ones(1).cuda()\nsys.exit(9)")
    assert (run.status, run.exit_code) == ("failed", 9) and run.processes[0]["phases"]


@pytest.mark.nightly
def test_what_does_not_fit_ends_with_its_peaks(program):
    text = "import torch\nkept = [torch.empty(1 << 30, device='cuda')]\nwhile True:\n    kept.append(kept[0] * 2)\n"
    run, _ = program(text)
    assert (run.status, run.exit_code) == ("out of memory", 4)
    assert max(run.processes[0]["phases"]["set-up"]) >= 12 << 30


RETRIED = """
import gc, torch
gc.disable()
samples = torch.empty(1 << 29, device="cuda")
def attempt():
    kept = [samples]
    while True:
        kept.append(kept[-1] * 2)
try:
    attempt()
except torch.OutOfMemoryError:
    print(torch.cuda.max_memory_allocated() >> 31, torch.cuda.memory_allocated() >> 31)
print(torch.cuda.memory_allocated() >> 31)
"""


@pytest.mark.nightly
def test_after_an_out_of_memory_error_the_tensors_of_the_attempt_are_freed(program):
    run, printed = program(RETRIED)
    assert run.status == "finished" and int(printed.out.split()[0]) > 5 and printed.out.split()[-1] == "1", printed


COMPILED = """
import sys, torch, torch.nn.functional as F
from torch import nn
assert "torch._dynamo" not in sys.modules, "its import would take seconds in each process"
@torch.compile
def unused(x):
    return x
def chain(x):
    return torch.tanh(torch.sin(x) + 1).square() * 2
def head(x, y):
    with torch.autocast("cuda", torch.bfloat16):
        return F.cross_entropy(layer(x).float(), y)
def used(function, *tensors):
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = function(*tensors)
        held = torch.cuda.memory_allocated() - before
        out.sum().backward()
        peak = torch.cuda.max_memory_allocated() - before
        tensors[0].grad = layer.weight.grad = None
        del out
    return held, peak
layer = nn.Linear(64, 32768, bias=False).cuda()
x = torch.randn(1024, 1024, device="cuda", requires_grad=True)
y = torch.randn(512, 64, device="cuda", requires_grad=True), torch.randint(0, 32768, (512,), device="cuda")
small = nn.Sequential(nn.Linear(64, 64), nn.ReLU()).cuda()
small.compile(mode="reduce-overhead")
small(y[0]).sum().backward()
for function in (chain, torch.compile(chain)):
    print(*used(function, x))
for function in (head, torch.compile(head, dynamic=False)):
    print(*used(function, *y))
"""


@pytest.mark.nightly
def test_compiled_code_keeps_what_the_compiler_keeps(program):
    run, printed = program(COMPILED, card="a100")
    assert run.status == "finished", printed.err
    chain, compiled_chain, head, compiled_head = ([*map(int, each.split())] for each in printed.out.splitlines()[-4:])
    size, logits = 1024**2 * 4, 512 * 32768 * 2
    assert chain[0] == 2 * size and compiled_chain[0] == size  # the result, and without the compiler that of tanh
    assert head[1] > 6 * logits  # with the log-softmax and its gradient in fp32
    assert logits < compiled_head[1] < 2 * logits  # in bf16; the gradient overwrites the logits
    assert "global hooks" not in printed.err and {"forward pass", "backward pass"} <= {*run.processes[0]["phases"]}


BROKEN = """
import torch
@torch.compile
def scaled(x, count):
    for _ in range(count.item()):
        x = x * 2
    if x.sum() > 1e9:
        print("never")
    return x + 1
count = torch.tensor(3, device="cuda")
print("made", scaled(torch.ones(1 << 20, device="cuda"), count).shape)
"""


@pytest.mark.nightly
def test_a_value_that_compiled_code_reads_is_known_assumed_or_missing(program):
    run, printed = program(BROKEN)
    assert run.status == "needs values" and "made" not in printed.out, printed.err
    run, printed = program(BROKEN, assumes=True)
    assert run.status == "finished" and "made torch.Size([1048576])" in printed.out, printed.err
    assert "never" not in printed.out


COUNTED = """
import torch
@torch.compile
def counted(count):
    return count.add_(1)
count = torch.zeros(4, dtype=torch.int64, device="cuda")
print("before", count.sum().item())
counted(count)
print("after", count.sum().item())
"""


@pytest.mark.nightly
def test_a_count_that_compiled_code_changed_is_unknown(program):
    run, printed = program(COUNTED)
    assert run.status == "needs values" and printed.out.split() == ["before", "0"], printed.err


CAPTURED = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Dropout(0.1), torch.nn.Linear(512, 8)).cuda()
compiled = torch.compile(model, mode="reduce-overhead")
for step in range(4):
    torch.compiler.cudagraph_mark_step_begin()
    compiled(torch.randn(64, 512, device="cuda")).sum().backward()
    model.zero_grad()
beside, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    stream = torch.cuda.current_stream()
    with torch.cuda.stream(beside):
        before = torch.cuda.is_current_stream_capturing()
    beside.wait_stream(stream)
    with torch.cuda.stream(beside):
        print(before, torch.cuda.is_current_stream_capturing())
    stream.wait_stream(beside)
"""


@pytest.mark.nightly
def test_only_streams_that_waited_for_a_captured_one_are_captured(program):
    run, printed = program(CAPTURED)
    assert run.status == "finished" and printed.out.splitlines()[-1] == "False True", printed.err


# The garbage collector is off: torch traces its uncompiled attention, and frees some scalars of it (512 bytes each)
# only when the collector runs, in some runs at another moment.
FLEX = """
import gc, torch
gc.disable()
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
def attention(q, k, v, mask):
    return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
def peaks(function):
    made = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
    q, k, v = (torch.randn(2, heads, 1024, 64, **made) for heads in (8, 2, 2))
    for _ in range(2):
        q.grad = k.grad = v.grad = None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = function(q, k, v, mask)
        peak = torch.cuda.max_memory_allocated() - before
        held = torch.cuda.memory_allocated() - before
        out.backward(torch.ones_like(out))
        last = torch.cuda.max_memory_allocated() - before
        del out
    return peak, held, last
mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 1024, 1024, device="cuda")
for function in (torch.compile(attention), attention):
    print(*peaks(function))
"""


@pytest.mark.nightly
def test_flex_attention_that_a_program_compiles_takes_the_memory_of_its_kernels(program):
    run, printed = program(FLEX, card="a100")
    assert run.status == "finished", printed.err
    compiled, plain = ([*map(int, line.split())] for line in printed.out.splitlines()[-2:])
    out, sums = 2 * 8 * 1024 * 64 * 2, 2 * 8 * 1024 * 4
    made = out + 2 * sums  # the output, log-sum-exps and largest scores; backward adds 3 gradients and a factor
    assert compiled == [made, made - sums, made + out + out + out // 2]  # the largest scores are not kept
    assert plain[1] == made and plain[0] > 2 * 8 * 1024**2 * 4


@pytest.mark.nightly
def test_ranks_that_a_program_starts_are_reported_each(program):
    text = """
import torch, torch.multiprocessing as mp
def main(rank):
    torch.cuda.set_device(0)
    torch.ones(1 << (20 + rank), device="cuda")
    if rank == 1:
        torch.randn(4, device="cuda").sum() > 0 or print("never")
if __name__ == "__main__":
    mp.spawn(main, nprocs=2)
"""
    run, _ = program(text)
    assert run.status == "needs values" and len([each for each in run.processes if each["phases"]]) == 2
    assert "print" in next(each["error"]["line"] for each in run.processes if each["error"])


OBJECTS = """
import os, signal, sys, time, torch, torch.distributed as dist, torch.multiprocessing as mp
def main(rank, ranks):
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29517")
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=ranks)
    mine, wanted = {"rank": rank, "text": "x" * (rank + 1) * 5000}, [*range(ranks)]
    found, gathered, sent = [None] * ranks, [None] * ranks if rank == 0 else None, [mine]
    dist.all_gather_object(found, mine)
    dist.gather_object(mine, gathered)
    dist.broadcast_object_list(sent, 0)
    own = [None]
    dist.scatter_object_list(own, [{"for": each} for each in wanted] if rank == 0 else None, src=0)
    assert own == [{"for": rank}]
    counts = torch.zeros(ranks, dtype=torch.long, device="cuda")
    dist.all_gather_into_tensor(counts, torch.tensor([rank], device="cuda"))
    assert [each["rank"] for each in found] == counts.tolist() == wanted and sent[0]["rank"] == 0
    assert gathered is None or [each["rank"] for each in gathered] == wanted
    total, most = torch.tensor([rank + 1, 5], device="cuda"), torch.tensor(rank / 2, device="cuda")
    dist.all_reduce(total)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    assert total.tolist() == [sum(wanted) + ranks, 5 * ranks] and most.item() == (ranks - 1) / 2
    layer = torch.nn.SyncBatchNorm.convert_sync_batchnorm(torch.nn.BatchNorm1d(4)).cuda()
    layer(torch.randn(3, 4, device="cuda")).sum().backward()
    number, near = torch.tensor([rank + 5], device="cuda"), torch.zeros(1, dtype=torch.long, device="cuda")
    ends = {"peer": (rank + 1) % ranks}, {"peer": (rank - 1) % ranks}
    if ranks > 1:
        both = [dist.P2POp(dist.irecv, near, **ends[1]), dist.P2POp(dist.isend, number, **ends[0])]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        assert near.item() == (rank - 1) % ranks + 5
        if rank == 0:
            dist.send(number, 1)
            dist.send_object_list([mine], 1)
        elif rank == 1:
            dist.recv(near, 0)
            dist.recv_object_list(sent, 0)
            assert near.item() == 5 and sent[0]["rank"] == 0
    loss = torch.randn(1, device="cuda")
    dist.all_reduce(loss)
    assert repr(loss.item()) == "unknown"
    if rank == 0:
        time.sleep(0.5)
        torch.save(loss, "shared.pt")
    dist.barrier()
    torch.load("shared.pt")
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL if rank == 0 and len(sys.argv) > 1 else 0)
    dist.destroy_process_group()
if __name__ == "__main__":
    count = torch.cuda.device_count()
    mp.spawn(main, (count,), nprocs=count)
"""


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_exchange_values_and_wait_at_a_barrier(program, ranks):
    run, printed = program(OBJECTS, card=dataclasses.replace(CARDS["t4"], devices=ranks))
    assert run.status == "finished", printed.err


@pytest.mark.nightly
def test_weights_that_a_killed_rank_saved_are_removed(program, tmp_path):
    run, _ = program(OBJECTS, "killed", card=dataclasses.replace(CARDS["t4"], devices=2))
    assert run.status == "failed" and [path.name for path in tmp_path.iterdir()] == ["program.py"]


KERNEL = """
import torch, triton
import triton.language as tl
@triton.jit
def add_up(values, total, count, block: tl.constexpr):
    places = tl.arange(0, block)
    tl.atomic_add(total, tl.sum(tl.load(values + places, mask=places < count, other=0.0)))
total, counted = torch.zeros(1, device="cuda"), torch.zeros(1, dtype=torch.long, device="cuda")
add_up[(1,)](torch.randn(100, device="cuda"), total, 100, block=128)
print(total.item(), counted.item())
"""


@pytest.mark.nightly
def test_what_a_kernel_of_triton_may_have_written_is_unknown(program):
    pytest.importorskip("triton")
    run, printed = program(KERNEL, card="a100")
    assert run.status == "finished" and printed.out == "unknown 0\n", printed.err


PROFILED = """
import torch
from torch.profiler import ProfilerActivity, profile
with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], profile_memory=True) as profiler:
    torch.nn.Linear(64, 64).cuda()(torch.randn(8, 64, device="cuda")).sum().backward()
assert "aten::addmm" in profiler.key_averages().table()
"""


@pytest.mark.nightly
def test_a_program_with_a_profiler_ends(program):
    run, printed = program(PROFILED)
    assert run.status == "finished", printed.err


OLD_AND_SPARSE = """
import torch
whole = torch.cuda.LongTensor([3, 1, 2])
assert whole.tolist() == [3, 1, 2] and isinstance(whole, torch.cuda.LongTensor) and whole.new([0, 2]).tolist() == [0, 2]
assert not isinstance(whole, torch.cuda.IntTensor)
assert whole[torch.cuda.BoolTensor([True, False, True])].tolist() == [3, 2]
for kind in (torch.cuda.IntTensor, "torch.cuda.FloatTensor"):
    assert torch.LongTensor([1, 2]).type(kind).tolist() == whole[1:].type(kind).tolist() == [1, 2]
torch.set_default_tensor_type(torch.cuda.FloatTensor)
assert torch.zeros(3).tolist() == [0, 0, 0] and torch.zeros(3).is_cuda
torch.set_default_device("cuda")
assert torch.tensor([2, 4]).is_cuda and torch.arange(3)[torch.tensor([2, 1])].tolist() == [2, 1]
places = torch.tensor([[2, 1, 0, 1, 2], [3, 0, 1, 0, 3]], device="cuda")
sparse = torch.sparse_coo_tensor(places, torch.randn(5, device="cuda"), (4, 4), requires_grad=True).coalesce()
assert sparse.indices().tolist() == [[0, 1, 2], [1, 0, 3]] and sparse.is_coalesced()
torch.sparse.sum(sparse).backward()
assert torch.sparse_coo_tensor(places.cpu(), torch.ones(5).cpu(), (4, 4)).cuda().coalesce()._nnz() == 3
layer = torch.nn.Embedding(100, 16, sparse=True).cuda()
optimizer = torch.optim.SparseAdam(layer.parameters())
layer(torch.tensor([[1, 2, 2], [3, 1, 1]])).sum().backward()
assert layer.weight.grad.coalesce().indices().tolist() == [[1, 2, 3]]
optimizer.step()
print("to its end")
summed = torch.sparse_coo_tensor(torch.randn(2, 5).topk(5).indices, torch.randn(5), (5, 5)).coalesce()
assert summed._nnz() == 5
"""


@pytest.mark.nightly
def test_old_constructors_give_known_values_and_sparse_tensors_are_coalesced(program):
    run, printed = program(OLD_AND_SPARSE)
    assert run.status == "needs values" and "to its end" in printed.out and "sparse" in repr(run), printed.err
    run, printed = program(OLD_AND_SPARSE, assumes=True)
    assert run.status == "finished", printed.err


GRAPH = """
import torch
layer = torch.nn.Linear(512, 512).cuda()
optimizer = torch.optim.Adam(layer.parameters(), capturable=True)
samples, count = torch.randn(64, 512, device="cuda"), torch.zeros(1, dtype=torch.long, device="cuda")
def step():
    optimizer.zero_grad(set_to_none=True)
    loss = layer(samples).square().mean()
    loss.backward()
    optimizer.step()
    return loss
other = torch.cuda.Stream()
with torch.cuda.stream(other):
    step()
optimizer.zero_grad(set_to_none=True)
graph, before = torch.cuda.CUDAGraph(), torch.cuda.memory_allocated()
with torch.cuda.graph(graph):
    loss = step()
    count += 1
kept = torch.cuda.memory_allocated() - before
assert kept > 1 << 20, "the gradients and what the graph works with"
graph.replay()
print(loss.item(), torch.cuda.memory_allocated() - before == kept)
torch.cuda.make_graphed_callables(layer, (samples,))(samples).sum().backward()
print(count.item())
"""


@pytest.mark.nightly
def test_a_captured_graph_keeps_its_memory_and_what_it_changes_is_unknown(program):
    run, printed = program(GRAPH)
    assert printed.out == "unknown True\n" and run.status == "needs values", printed.err
    assert "count.item()" in repr(run)


DISTRIBUTIONS = """
import torch
from torch import distributions
logits = torch.nn.Linear(8, 4).cuda()(torch.randn(3, 8, device="cuda"))
policy = distributions.Categorical(probs=logits.softmax(-1))
policy.log_prob(policy.sample()).mean().backward()
normal = distributions.Normal(logits.detach(), logits.detach().exp(), validate_args=True)
normal.log_prob(normal.rsample())
try:
    distributions.Categorical(probs=torch.tensor([-1.0, 2.0]))
    raise SystemExit("a known value that is wrong was accepted")
except ValueError:
    pass
"""


@pytest.mark.nightly
@pytest.mark.parametrize("assumes", [False, True])
def test_unknown_parameters_of_a_distribution_are_taken_as_valid(program, assumes):
    run, printed = program(DISTRIBUTIONS, assumes=assumes)
    assert run.status == "finished", printed.err


LIBRARIES = {
    "cuDNN": ["torch.nn.LSTM(8, 8).cuda()", "torch.nn.GRU(8, 8).cuda()(x.float())"],
    "cuFFT": ["torch.fft.rfft(x)", "torch.stft(x.flatten(), 8, return_complex=True)"],
    "cuSOLVER": [
        "torch.linalg.svd(x)",
        "torch.linalg.qr(x)",
        "torch.linalg.cholesky(x)",
        "torch.nn.init.orthogonal_(x)",
    ],
    "cuSPARSE": ["torch.eye(8).to_sparse().cuda() @ x", "torch.eye(8).to_sparse_csr().cuda() @ x"],
}


@pytest.mark.nightly
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_library_that_the_stub_does_not_have_is_named_and_no_process_dies(program, library):
    for line in LIBRARIES[library]:
        text = f"import torch\nx = torch.randn(8, 8, device='cuda')\n{line}\n"
        run, printed = program(text)
        assert (run.status, run.exit_code) == ("needs a library", 3), (line, run, printed.err)
        assert library in repr(run) and line in repr(run) and "add --assume" in repr(run)


WITHOUT_WORKSPACE = """
import torch
x = torch.randn(4, 64, 64, device="cuda", requires_grad=True)
product = torch.fft.rfft(x) * torch.randn(33, device="cuda")
assert product.shape == (4, 64, 33) and product.nbytes == 4 * 64 * 33 * 8
torch.fft.irfft(product, n=64).square().mean().backward()
assert x.grad.shape == x.shape
sound, window = torch.randn(2, 4000, device="cuda"), torch.hann_window(256, device="cuda")
assert torch.stft(sound, 256, 64, window=window, return_complex=True).shape == (2, 129, 63)
places = torch.stack((torch.arange(50).repeat(4), torch.arange(200) % 7)).cuda()
graph = torch.sparse_coo_tensor(places, torch.ones(200, device="cuda"), (50, 50)).coalesce()
layer = torch.nn.Linear(16, 8).cuda()
torch.sparse.mm(graph, layer(torch.randn(50, 16, device="cuda"))).sum().backward()
assert layer.weight.grad.shape == (8, 16)
assert (graph.to_sparse_csr() @ sound.new_empty(50, 4)).shape == (50, 4)
assert (graph @ sound.new_empty(50)).shape == (50,)
weight = torch.nn.init.orthogonal_(torch.empty(64, 32, device="cuda"))
before = torch.cuda.memory_allocated()
kept = torch.linalg.svd(weight, full_matrices=False)
assert torch.cuda.memory_allocated() - before == 4 * (64 * 32 + 32 * 32) + 512, "two matrices and 32 numbers"
square = weight.T @ weight
assert torch.linalg.eigh(square).eigenvalues.shape == torch.linalg.svdvals(square).shape == (32,)
assert torch.linalg.cholesky(square).shape == torch.linalg.pinv(square).shape == (32, 32)
print("to its end")
torch.linalg.svd(square.clone().requires_grad_())
"""


@pytest.mark.nightly
def test_with_assumed_values_libraries_need_no_workspace(program):
    run, printed = program(WITHOUT_WORKSPACE, assumes=True)
    assert printed.out == "to its end\n" and run.status == "needs a library", printed.err
    (process,) = run.processes
    assert process["answers"]["results of CUDA libraries, without their workspace"] >= 6
    assert "cuSOLVER" in process["error"]["message"] and "add --assume" not in repr(run)


RECURRENT = """
import torch
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
{cudnn}
layer = torch.nn.{kind}(256, 256, 2, bidirectional=True, batch_first=True, dropout=0.1).cuda()
weights = [*layer.parameters()]
blocks = len({{weight.untyped_storage().data_ptr() for weight in weights}})
assert blocks == (len(weights) if "{cudnn}" else 1), "cuDNN has the weights in one block"
optimizer = torch.optim.SGD(weights, lr=0.1)
for lengths in ([3, 64, 17], [64, 64, 64]):
    samples = torch.randn(3, 64, 256, device="cuda")
    packed = pack_padded_sequence(samples, torch.tensor(lengths), batch_first=True, enforce_sorted=False)
    assert packed.data.shape[0] == sum(lengths) and packed.batch_sizes.sum() == sum(lengths)
    output, found = pad_packed_sequence(layer(packed)[0], batch_first=True)
    assert output.shape == (3, max(lengths), 512) and found.tolist() == lengths
    output.mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_with_assumed_values_recurrent_layers_run_torchs_own_kernels(program, kind):
    run, printed = program(RECURRENT.format(kind=kind, cudnn=""), assumes=True)
    assert run.status == "finished", printed.err
    (process,) = run.processes
    assert process["answers"]["recurrent layers computed by torch's own kernels, not cuDNN's"] == 2
    other, printed = program(RECURRENT.format(kind=kind, cudnn="torch.backends.cudnn.enabled = False"), assumes=True)
    assert other.status == "finished", printed.err
    assert not any("recurrent" in kind for kind in other.processes[0]["answers"]), "the program chose these kernels"
    for phase in ("forward pass", "backward pass"):
        peaks = [each.processes[0]["phases"][phase][0] for each in (run, other)]
        assert peaks[0] == pytest.approx(peaks[1], abs=20_000), "the same kernels; one block of weights instead of many"


GENERATION = """
import torch, transformers
config = transformers.LlamaConfig(vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
                                  num_attention_heads=2, eos_token_id=0, pad_token_id=1)
model = transformers.LlamaForCausalLM(config).cuda()
for samples in (True, False):
    made = model.generate(torch.full((1, 3), 5, device="cuda"), max_new_tokens=9, do_sample=samples)
    assert made.tolist() == [[5] * 3 + [25] * 9], made
"""


@pytest.mark.nightly
def test_an_assumed_token_has_no_special_meaning_and_never_ends_a_generation(program):
    run, printed = program(GENERATION, assumes=True)
    assert run.status == "finished" and "evaluation and generation" in repr(run), printed.err


def command(*words):
    words = [sys.executable, "-m", "perf_helpers.cli", "rehearse", "--card", "t4", *words]
    return subprocess.run(words, capture_output=True, text=True)


@pytest.mark.nightly
def test_the_command_line_reports_a_program_and_refuses_options_that_do_not_apply(tmp_path):
    (tmp_path / "mine.py").write_text("import torch\nprint('mine')\nprint(float(torch.randn(999).cuda().mean()))")
    done = command("--", "python", str(tmp_path / "mine.py"))
    assert done.returncode == 3 and done.stdout == "mine\n" and "--assume" in done.stderr and "T4" in done.stderr
    done = command("--assume", "--json", "--", "python", str(tmp_path / "mine.py"))
    assert done.returncode == 0 and json.loads(done.stdout)["status"] == "finished"
    for words in (["--seq-len", "9", "--", "python"], ["--bf16", "--", "python"], ["--assume", "--model", "bert-tiny"]):
        done = command(*words)
        assert done.returncode == 2 and words[0] in done.stderr


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["python", "mine.py"], "needs -- before it: -- python mine.py"),
        (["--", "mine.py", "--lr", "1"], "put python before mine.py: -- python mine.py --lr 1"),
        (["--", "./"], "cannot be run"),
        (["--asume", "--", "python", "mine.py"], "Did you mean --assume?"),
        (["--model", "gpt2", "--", "python", "mine.py"], "--model and a command after -- cannot both be rehearsed"),
    ],
)
def test_a_command_that_is_typed_wrongly_is_refused_with_what_to_type(words, hint):
    done = command(*words)
    assert done.returncode == 2 and hint in done.stderr


ENDLESS = """
import sys, time, torch
torch.save({"weight": torch.randn(300, device="cuda")}, "weights.pt")
print("ready", flush=True)
while True:
    time.sleep(0.1)
"""


@pytest.mark.nightly
@pytest.mark.parametrize(("stop", "number"), [(os.killpg, signal.SIGINT), (os.kill, signal.SIGTERM)])
def test_an_interrupted_program_is_reported_with_its_peaks_and_leaves_no_weights(tmp_path, stop, number):
    (tmp_path / "mine.py").write_text(ENDLESS)
    words = [sys.executable, "-m", "perf_helpers.cli", "rehearse", "--card", "t4", "--", "python", "mine.py"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, cwd=tmp_path, start_new_session=True, **pipes) as process:
        assert process.stdout.readline() == "ready\n"
        stop(process.pid, number)
        printed = process.communicate(timeout=60)[1]
    assert process.returncode == 130 and "you interrupted it" in printed and "1.5 KiB allocated" in printed
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]


@pytest.mark.nightly
def test_values_are_assumed_only_on_request():
    def read():
        import torch

        return type(torch.randn(3, device="cuda").sum().item()).__name__

    with Rehearsal(CARDS["t4"]) as stage:
        assert stage.submit(read).result() == "Unknown"
