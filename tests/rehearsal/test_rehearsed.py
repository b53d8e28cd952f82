"""Rehearsals of trainings and functions. These tests need torch's CUDA build (make wheel) and a compiler."""

import json
import shutil
import subprocess
import sys

import cloudpickle
import nbformat
import pytest
import rehearse_lessons

from perf_helpers import Lab
from trainmem import rehearsal
from trainmem.core.task import Task
from trainmem.estimate import estimate
from trainmem.rehearsal import CARDS, Rehearsal, build, rehearse
from trainmem.unknown import NeedsValues, Unknown

if build.problem() or build.interpreter() is None:
    pytest.skip("torch's CUDA build is not here: make wheel", allow_module_level=True)

cloudpickle.register_pickle_by_value(sys.modules[__name__])
SMALL = Task("bert-small", seq_len=128)


@pytest.fixture(scope="module")
def a100():
    with Rehearsal(CARDS["a100"]) as stage:
        yield stage


@pytest.fixture(scope="module")
def kept():
    """Yield a rehearsed A100 on which torch keeps cuBLAS' workspaces, as torch before 2.15 did. The published peaks
    that the tests compare were measured with such a torch.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_CUBLAS_WORKSPACE_CACHE", "1")
        stage = Rehearsal(CARDS["a100"])  # the process keeps the variable; later ones must not get it
    with stage:
        yield stage


@pytest.fixture(scope="module")
def here(a100):
    return lambda function, *arguments: a100.submit(function, *arguments).result()


# ---- memory, against what others counted


def cross_entropy(classes):
    import torch

    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    rows = torch.randn(8 * 2048, classes, requires_grad=True, device="cuda")
    target = torch.randint(classes, (8 * 2048,), device="cuda")
    for _ in range(2):
        torch.nn.functional.cross_entropy(rows, target).backward(retain_graph=True)
    return torch.cuda.max_memory_allocated()


def swiglu(tokens):
    import torch
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    torch.cuda.empty_cache()
    config = LlamaConfig(hidden_size=4096, intermediate_size=11008, hidden_act="silu")
    layer = LlamaMLP(config).to("cuda", torch.bfloat16)
    rows = torch.randn(4, tokens, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn_like(rows)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        result = layer(rows)
        result.backward(gradient, retain_graph=True)
        del result
    return torch.cuda.max_memory_allocated()


# Peaks on a real A100, in MiB: linkedin/Liger-Kernel, benchmark/data/all_benchmark_data.csv, torch's side.
@pytest.mark.nightly
@pytest.mark.parametrize(
    "function, size, published",
    [
        (cross_entropy, 4096, 1280.126),
        (cross_entropy, 32768, 10240.126),
        (cross_entropy, 131072, 40960.126),
        (swiglu, 1024, 1294.25),
        (swiglu, 4096, 3452.25),
        (swiglu, 8192, 6372.25),
    ],
)
def test_peaks_published_for_a_real_a100_come_out_to_the_digit(kept, function, size, published):
    assert kept.submit(function, size).result() / 2**20 == pytest.approx(published, abs=0.0006)


SCRIPT = """
import sys, tempfile, torch, transformers
from trainmem.core.task import Task
transformers.logging.set_verbosity_error()
task = Task("bert-small", seq_len=128)
model, options = task.build_model(), {arguments}
with tempfile.TemporaryDirectory() as folder:
    settings = transformers.TrainingArguments(folder, max_steps=3, report_to="none", save_strategy="no", **options)
    trainer = transformers.Trainer(model=model, args=settings, train_dataset=task.dataset())
    trainer.train()
print(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
"""


@pytest.mark.nightly
@pytest.mark.parametrize("card", ["t4", "h100"])
@pytest.mark.parametrize("arguments", [{"per_device_train_batch_size": 4}, {"fp16": True, "optim": "adafactor"}])
def test_the_lab_counts_what_a_plain_script_counts(card, arguments):
    with rehearsal.command(CARDS[card]) as (python, environment):
        words = [str(python), "-c", SCRIPT.format(arguments=arguments)]
        done = subprocess.run(words, env=environment, capture_output=True, text=True)
    allocated, reserved = map(int, done.stdout.split()[-2:])
    run = rehearse(SMALL, on=card, **arguments)
    assert (run.peak_bytes, run.memory.reserved_bytes) == (allocated, reserved)
    assert sum(run.memory.breakdown.values()) == run.peak_bytes and run.timing is None
    assert run.machine["rehearsed"] and run.memory.context_bytes is None is run.memory.device_used_bytes


def masks(padded):
    """Return, per layer, the sum of the mask that a BERT passes to attention, or None for no mask.

    `padded`: whether the batch has padding.
    """
    import torch

    model = Task("bert-tiny", seq_len=64).build_model(attn_implementation="sdpa").cuda()
    ids = torch.ones(2, 64, dtype=torch.long, device="cuda")
    mask, seen, attention = torch.ones_like(ids), [], torch.nn.functional.scaled_dot_product_attention
    if padded:
        mask[0, 30:] = 0

    def watched(*args, attn_mask=None, **kwargs):
        seen.append(None if attn_mask is None else attn_mask.sum().item())
        return attention(*args, attn_mask=attn_mask, **kwargs)

    torch.nn.functional.scaled_dot_product_attention = watched
    try:
        model(input_ids=ids, attention_mask=mask)
    finally:
        torch.nn.functional.scaled_dot_product_attention = attention
    return seen


@pytest.mark.nightly
def test_a_mask_that_pads_nothing_is_seen_to_pad_nothing(here):
    assert here(masks, False) == [None, None]
    assert here(masks, True) == [64 * 30 + 64 * 64] * 2


@pytest.mark.nightly
def test_a_deterministic_training_takes_what_the_estimate_says(a100):
    task = Task("bert-tiny", seq_len=8, config={"hidden_size": 64, "intermediate_size": 64, "vocab_size": 100})
    recipe = {"full_determinism": True, "bf16": True, "per_device_train_batch_size": 4}
    found = Lab("gpu", executor=a100).train("deterministic", task=task, measure="memory", **recipe).memory
    answer = estimate(task, device="cuda", compute_capability=(8, 0), **recipe).memory
    assert (answer.peak_bytes, answer.reserved_bytes) == (found.peak_bytes, found.reserved_bytes)


@pytest.mark.nightly
def test_what_does_not_fit_ends_with_torchs_own_words():
    run = rehearse(Task("bert-large", seq_len=512), on="t4", per_device_train_batch_size=64)
    assert run.status == "out of memory" and not run.memory
    assert "CUDA out of memory. Tried to allocate" in run.message and "14.56 GiB" in run.message


@pytest.mark.nightly
def test_a_card_of_the_users_own_and_a_function():
    def loop(task):
        import torch

        model = task.build_model().cuda()
        for _ in range(2):
            model(**task.batch(4, "cuda")).loss.backward()
        return [torch.cuda.get_device_capability(), torch.cuda.get_device_properties(0).total_memory]

    run = rehearse(loop, task=SMALL, compute_capability=(8, 6), device_memory="5GB")
    assert run.value == [[8, 6], 5_000_000_000] and run.peak_bytes > 8 * SMALL.parameters()


@pytest.mark.nightly
def test_two_ranks_have_a_device_each():
    alone = rehearse(SMALL, on="t4", per_device_train_batch_size=4)
    both = rehearse(SMALL, on="t4", processes=2, per_device_train_batch_size=4)
    assert both.ok, both.message
    first, second = [rank["peak_bytes"] for rank in both.ranks]
    assert first == second and first - alone.peak_bytes == pytest.approx(4 * SMALL.parameters(), rel=0.01)  # buckets


@pytest.mark.nightly
def test_two_ranks_on_one_device_are_refused(a100):
    run = Lab("gpu", executor=a100).train("two", task=SMALL, processes=2, measure="memory")
    assert run.status == "refused" and "use_cpu=True" in run.message


@pytest.mark.nightly
def test_expandable_segments_and_a_full_card(monkeypatch):
    def fill(task):
        import torch

        blocks = [torch.empty(100 << 20, dtype=torch.uint8, device="cuda") for _ in range(20)]
        del blocks[::2]
        free, total = torch.cuda.mem_get_info()
        return [torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), total - free]

    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    allocated, reserved, used = rehearse(fill, on="t4", task=SMALL).value
    assert allocated == 10 * (100 << 20) and allocated < reserved <= used


# ---- values


def integers():
    import torch

    labels = torch.tensor([3, -100, 5, -100], device="cuda")
    found = [(labels != -100).sum().item(), labels[labels > 0].tolist(), labels.max().item(), bool((labels < 9).all())]
    labels += 1
    labels[0] = 7
    found += [labels.tolist(), torch.arange(6, device="cuda").view(2, 3).t().contiguous().tolist()]
    found += [torch.nonzero(labels > 0).flatten().tolist(), torch.nn.functional.one_hot(labels[:1]).shape[1]]
    buffer = torch.empty(3, dtype=torch.long, device="cuda").fill_(4)
    buffer[1:].copy_(torch.tensor([5, 6]))
    found += [buffer.tolist(), torch.empty_like(buffer).copy_(torch.tensor([7, 8, 9])).tolist()]
    stop = torch.zeros(2, dtype=torch.bool, device="cuda") | torch.full((2,), True, device="cuda")
    return [*found, bool(stop.all()), torch.unique(torch.tensor([2, 2, 1]).cuda()).tolist(), labels.cpu().tolist()]


@pytest.mark.nightly
def test_what_is_whole_or_boolean_is_computed(here):
    moved = [7, -99, 6, -99]
    views = [[0, 3], [1, 4], [2, 5]]
    expected = [2, [3, 5], 5, True, moved, views, [0, 2], 8, [4, 5, 6], [7, 8, 9], True, [1, 2], moved]
    assert here(integers) == expected


def membership():
    import torch

    numbers = torch.arange(4, device="cuda")
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    found = 3 in numbers, 9 in numbers
    return found, torch.cuda.memory_stats()["allocation.all.allocated"] - before


def grouped():
    """Return how many blocks a grouped matmul allocates: [with unknown ends of its groups, with known ends]."""
    import torch

    rows, experts = torch.randn(16, 8, device="cuda"), torch.randn(4, 8, 8, device="cuda")
    known = torch.tensor([4, 8, 12, 16], dtype=torch.int32, device="cuda")
    unknown, allocated = rows[:4, 0].cumsum(0).int(), []
    for ends in (known, unknown, known):
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        torch.nn.functional.grouped_mm(rows, experts, offs=ends)
        allocated.append(torch.cuda.memory_stats()["allocation.all.allocated"] - before)
    return allocated[1:]


@pytest.mark.nightly
def test_a_grouped_matmul_with_unknown_groups_asks_for_workspaces_too(here):
    unknown, known = here(grouped)
    assert unknown == known


def arrivals():
    import torch

    numbers, other = torch.arange(500), torch.empty(1, dtype=torch.int64, device="cuda")
    ways = [numbers.cuda(), numbers.cuda(0), numbers.cuda("cuda:0"), numbers.cuda(torch.device("cuda"))]
    ways += [numbers.cuda(device="cuda", non_blocking=True), numbers.pin_memory().to("cuda", non_blocking=True)]
    ways += [numbers.to(0), numbers.to(other), numbers.type_as(other), numbers.to("cuda", torch.int32)]
    ways += [torch.asarray(numbers.numpy(), device="cuda"), torch.as_tensor(numbers.numpy(), device="cuda")]
    ways += [torch.empty_like(numbers, device="cuda").copy_(numbers), other.new_tensor(numbers.tolist())]
    return [int(way.max()) for way in ways]


def test_whole_numbers_that_were_sent_to_the_device_are_known_however_they_were_sent(here):
    assert here(arrivals) == [499] * 14


@pytest.mark.nightly
def test_a_question_about_known_values_asks_the_allocator_as_on_a_device(here):
    # Which are equal, and whether any is: transformers asks so whether a batch is padded.
    assert here(membership) == ((True, False), 4)


def constants():
    import io

    import torch

    file = io.BytesIO()
    torch.save({"steps": torch.arange(5)}, file)
    file.seek(0)
    found = [torch.load(file, map_location="cuda")["steps"].tolist()]
    angles = 1.0 / 10000 ** (torch.arange(0, 128, 2, device="cuda").float() / 128)
    found += [[float(each) for each in torch.linspace(0, 0.5, 12, device="cuda")][-1], float(angles[0])]
    return [*found, bool((angles < 2).all())]


def test_small_constants_of_the_device_and_loaded_whole_numbers_are_known(here):
    assert here(constants) == [[0, 1, 2, 3, 4], 0.5, 1.0, True]


def sizes():
    import torch

    rows = torch.randn(2, 4, device="cuda")
    chosen = rows.argmax(1)
    found = [rows.repeat_interleave(3, dim=1), torch.where(rows > 0, rows, 0), torch.nn.functional.one_hot(chosen, 4)]
    found += [
        rows.repeat_interleave(torch.tensor([1, 2], device="cuda"), dim=0),
        rows[torch.tensor([True, False]).cuda()],
    ]
    found += [rows.masked_select(torch.ones(2, 4, dtype=torch.bool, device="cuda"))]
    rows[rows > 1] = 0.0
    return [list(tensor.shape) for tensor in found]


def test_a_size_that_no_value_decides_is_no_question(here):
    assert here(sizes) == [[2, 12], [2, 4], [2, 4], [3, 4], [1, 4], [8]]


def chosen_by_masks():
    import torch

    mask = torch.tensor([[True, False, True], [False, False, True]]).cuda()
    rows = torch.randn(2, 3, 4, device="cuda", requires_grad=True)
    flat = torch.randn(2, 3, device="cuda", requires_grad=True)
    rows[mask].sum().backward()
    before = torch.cuda.memory_stats()["allocated_bytes.all.current"]
    kept = rows[mask]  # for its backward the mask is kept, and not where it is true
    grown = torch.cuda.memory_stats()["allocated_bytes.all.current"] - before
    flat.masked_scatter(mask, torch.randn(3, device="cuda", requires_grad=True)).sum().backward()
    whole = torch.arange(6, device="cuda").view(2, 3)
    found = whole[mask].tolist(), mask.nonzero().tolist(), torch.argwhere(mask).tolist()
    whole[mask] = torch.tensor([7, 8, 9], device="cuda")
    return [*kept.shape], grown, found, whole.tolist()


def test_what_a_mask_of_known_values_chooses_is_known_in_autograd_too(here):
    shape, grown, (numbers, *places), overwritten = here(chosen_by_masks)
    assert shape == [3, 4] and grown == 512
    assert numbers == [0, 2, 5] and places == 2 * [[[0, 0], [0, 2], [1, 2]]]
    assert overwritten == [[7, 1, 8], [3, 4, 9]]


def gradients_of_two_uses():
    import torch

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, tensor):
            return tensor.sum() * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient.expand(1 << 20) * 2

    weight = torch.randn(1 << 20, device="cuda", requires_grad=True)
    total = Doubled.apply(weight) + Doubled.apply(weight)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    total.backward()
    return (torch.cuda.max_memory_allocated() - before) // weight.nbytes


def test_gradients_that_python_made_are_added_in_place_as_on_a_card(here):
    assert here(gradients_of_two_uses) == 2, "a second reference to a gradient's storage costs a third tensor"


def chosen_by_unknown():
    import torch

    return torch.randn(4, device="cuda", requires_grad=True)[torch.randn(4, device="cuda") > 0].shape


def test_what_an_unknown_mask_chooses_is_no_guess(here):
    with pytest.raises(NeedsValues):
        here(chosen_by_unknown)


def choices_of_one_expert():
    import torch

    found = []
    for number in range(20):  # whatever lies in the memory: a range that is a point would be looked for in it
        left = [torch.tensor([value], dtype=torch.int32).cuda() for value in (9 + number, 1, 8, -number)]
        del left
        chosen = torch.randn(64, 5, device="cuda").topk(1).indices.flatten()
        found.append([*torch.histc(chosen.int(), bins=1, min=0, max=0).shape])
    return found


def test_a_histogram_needs_no_values_for_its_range(here):
    assert here(choices_of_one_expert) == 20 * [[1]]


def workspaces_of_groups():
    import torch

    experts = torch.randn(4, 16, 16, device="cuda")
    peaks = []
    for ends in (torch.zeros(4).int(), torch.arange(16, 80, 16).int()):
        for known in (True, False):
            ends = ends.cuda() if known else (ends.cuda() + torch.randn(4, device="cuda")).int()
            rows = torch.randn(64, 16, device="cuda", requires_grad=True)
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            torch._grouped_mm(rows, experts, offs=ends).backward(torch.randn(64, 16, device="cuda"))
            peaks.append(torch.cuda.max_memory_allocated() - before > 8 << 20)
    return peaks


def test_a_grouped_matmul_needs_a_workspace_unless_its_groups_are_known_to_be_empty(here):
    assert here(workspaces_of_groups) == [False, True, True, True]


def solved():
    import torch

    matrices, rows = torch.randn(5, 8, 8, device="cuda"), torch.randn(5, 8, 2, device="cuda")
    left = [torch.full((128,), 7, dtype=torch.int32).cuda() for _ in range(20)]
    del left  # the solver would write its status where these lay
    return [*torch.linalg.solve(matrices, rows).shape]


def test_equations_that_cublas_solves_are_no_singular_ones(here):
    assert here(solved) == [5, 8, 2]


def floats():
    import torch

    loss = (torch.randn(100, device="cuda") * 2).mean()
    finite = [torch.isfinite(loss).item(), torch.isnan(loss).any().item(), torch.full((1,), 0.5, device="cuda").item()]
    return [loss.item(), *finite, repr(loss), loss.cpu().item(), torch.stack([loss, loss]).tolist()]


def test_floating_point_is_unknown_and_finite(here):
    loss, finite, nan, written, shown, fetched, several = here(floats)
    assert isinstance(loss, Unknown) and isinstance(fetched, Unknown) and all(isinstance(x, Unknown) for x in several)
    assert (finite, nan, written) == (True, False, 0.5) and "unknown" in shown


def signs():
    import torch

    rows = torch.randn(100, device="cuda")
    total = torch.stack([rows.norm(), rows.abs().max()]).pow(2).sum() ** 0.5
    total.masked_fill_(total.isnan(), torch.tensor(-1.0, device="cuda"))
    total = torch.where(total.isinf(), torch.tensor(-1.0, device="cuda"), total)
    return bool((~torch.isfinite(total) | (total < 0)).any())


def test_a_norm_is_not_below_zero(here):
    assert here(signs) is False


@pytest.mark.nightly
def test_small_whole_numbers_reach_the_other_ranks():
    def broadcast(task):
        import torch
        import torch.distributed as dist

        dist.init_process_group("nccl")
        torch.cuda.set_device(dist.get_rank())
        first = torch.tensor([7, 8, 9] if dist.get_rank() == 0 else [-1, -1, -1], device="cuda")
        second = torch.tensor(dist.get_rank(), device="cuda")
        dist.broadcast(first, src=0)
        dist.broadcast(second, src=1)
        return [*first.tolist(), second.item()]

    run = rehearse(broadcast, on="a100", task=SMALL, processes=2)
    assert run.ok, run.message
    assert [rank["value"] for rank in run.ranks] == 2 * [[7, 8, 9, 1]]


def exchanged(task):
    """Return {collective: its result on this rank}; all ranks send the same numbers. The task is not used."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("nccl")
    rank, device = dist.get_rank(), torch.device("cuda", dist.get_rank())
    torch.cuda.set_device(device)

    def numbers(*values):
        return torch.tensor(values, device=device)

    def nothing(count=2):
        return [numbers(0, 0) for _ in range(count)]

    local, found = numbers(41, 42), {}
    found["all_gather"] = nothing()
    dist.all_gather(found["all_gather"], local)
    with dist._coalescing_manager(device=device, async_ops=False):  # one group of collectives
        found["all_gather, coalesced"] = [numbers(0, 0, 0, 0), numbers(0, 0, 0, 0)]
        dist.all_gather_into_tensor(found["all_gather, coalesced"][0], local)
        dist.all_gather_into_tensor(found["all_gather, coalesced"][1], local + 1)
    found["all_gather_into_tensor"] = numbers(0, 0, 0, 0)
    dist.all_gather_into_tensor(found["all_gather_into_tensor"], local)
    found["broadcast"] = local.clone() if rank == 0 else numbers(0, 0)
    dist.broadcast(found["broadcast"], src=0)
    found["all_reduce"] = local.clone()
    dist.all_reduce(found["all_reduce"])
    found["all_to_all_single"] = numbers(0, 0)
    dist.all_to_all_single(found["all_to_all_single"], numbers(7, 7))
    found["reduce_scatter_tensor"] = numbers(0)
    dist.reduce_scatter_tensor(found["reduce_scatter_tensor"], local)
    return {
        name: [t.tolist() for t in made] if isinstance(made, list) else made.tolist() for name, made in found.items()
    }


@pytest.mark.nightly
def test_collectives_give_what_equal_ranks_would_get():
    run = rehearse(exchanged, on="a100", task=SMALL, processes=2)
    assert run.ok, run.message
    for rank, value in enumerate(each["value"] for each in run.ranks):
        assert value == {
            "all_gather": [[41, 42], [41, 42]],
            "all_gather, coalesced": [[41, 42, 41, 42], [42, 43, 42, 43]],
            "all_gather_into_tensor": [41, 42, 41, 42],
            "broadcast": [41, 42],
            "all_reduce": [82, 84],
            "all_to_all_single": [7, 7],
            "reduce_scatter_tensor": [(82, 84)[rank]],
        }


def test_the_stub_answers_whatever_this_torch_copies_and_allocates_with():
    python = build.interpreter()
    assert build.unanswered(build._linked(build._site_packages(python))) == []
    assert build.doubts(python, build.library(python)) == ""


@pytest.mark.parametrize(
    "expression",
    [
        "bool(x > 0)",
        "bool(x < 0)",
        "bool(-rows.norm() < 0)",
        "bool(rows.norm() - 1 < 0)",
        "bool(rows.norm().sub_(1) < 0)",
        "float(x)",
        "int(x)",
        "x.cpu().numpy()",
        "rows[rows > 0]",
        "torch.nonzero(rows)",
        "rows.argmax().item()",
        "torch.equal(rows, rows)",
        "'yes' if x.item() > 1 else 'no'",
        "torch.testing.assert_close(rows, rows + 1)",
        "torch.testing.assert_close([x.item()], [1.0])",
    ],
)
def test_who_needs_a_value_hears_so_at_once(here, expression):
    def evaluated(expression):
        import torch

        rows = torch.randn(100, device="cuda")
        try:
            return eval(expression, {"torch": torch, "rows": rows, "x": rows.sum()})
        except Exception as error:
            while error and not isinstance(error, NeedsValues):
                error = error.__cause__ or error.__context__
            return type(error).__name__

    assert here(evaluated, expression) == "NeedsValues"


def test_an_experiment_that_needs_values_is_no_crash(a100):
    def decides(task):
        import torch

        return 1 if torch.randn(100, device="cuda").sum() > 0 else 2

    with pytest.raises(NeedsValues):
        Lab("gpu", executor=a100).run(decides, task=SMALL, measure="none")


@pytest.mark.nightly
def test_workers_of_a_data_loader_inherit_the_meter_and_have_no_gpu(a100):
    lab = Lab("gpu", executor=a100)
    arguments = {"task": SMALL, "measure": "memory", "per_device_train_batch_size": 2}
    alone, helped = (lab.train(f"{n} workers", dataloader_num_workers=n, **arguments) for n in (0, 2))
    assert helped.ok, helped.message
    assert helped.peak_bytes == alone.peak_bytes


def test_a_compiled_training_is_rehearsed_compiled(a100):
    lab, arguments = Lab("gpu", executor=a100), {"task": SMALL, "measure": "memory", "bf16": True}
    plain, compiled = (lab.train(f"compile {on}", torch_compile=on, **arguments) for on in (False, True))
    assert compiled.ok, compiled.message
    assert compiled.peak_bytes < plain.peak_bytes


@pytest.mark.nightly
def test_there_is_no_time_in_a_rehearsal(a100):
    lab = Lab("gpu", executor=a100)
    first, second = (lab.train(name, task=SMALL, per_device_train_batch_size=1) for name in ("first", "second"))
    assert isinstance(first.step_seconds, Unknown) and len(first.losses) == lab.profile.steps + lab.profile.warmup_steps
    assert second.losses and len(second.losses) == len(first.losses) and isinstance(second.samples_per_second, Unknown)
    compared = [lab.compare(first, second, turns=3).speed_ratio for _ in range(2)]  # the first takes its turns
    assert not any(ratio.known for ratio in compared)
    assert '"step_seconds": null' in json.dumps(first.to_dict())


# ---- a rehearsal that fails

MODEL = "model = lab.task.build_model().cuda()\nbatch = lab.task.batch(1)"
PLANTED = {  # what goes before, the wrong line, its error
    "a wrong NVML name": (
        "import pynvml\npynvml.nvmlInit()",
        "pynvml.nvmlDeviceGetMemoryInformation(0)",
        "AttributeError",
    ),
    "a CPU tensor meets a CUDA one": ("a = torch.ones(3).cuda()", "a + torch.ones(3)", "RuntimeError"),
    "a missing .to": (MODEL, "model(**batch)", "RuntimeError"),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_error_fails_with_lesson_cell_and_line(tmp_path, name):
    before, wrong, error = PLANTED[name]
    cells = [nbformat.v4.new_code_cell('profile = "auto"\nstrict = False\nout = ""')]
    cells[0].metadata["tags"] = ["parameters"]
    setup = 'import torch\nfrom perf_helpers import Claims, Lab\nlab = Lab(profile, out=out, lesson="05_planted")'
    sources = [setup, f"{before}\n{wrong}", "Claims(lab).finish()"]
    cells += [nbformat.v4.new_code_cell(source) for source in sources]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook = nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel})
    nbformat.write(notebook, tmp_path / "05_planted.ipynb")
    words = ["-m", "perf_helpers.cli", "course", tmp_path / "05_planted.ipynb", "--profile", "gpu"]
    with rehearse_lessons.guarded(CARDS["h100"]) as (python, environment):
        assert subprocess.run([python, *words, "--out", tmp_path / "out"], env=environment).returncode == 1
    (lesson,) = json.loads((tmp_path / "out" / "results.json").read_text())["lessons"]
    line = before.count("\n") + 2
    assert (lesson["name"], lesson["status"]) == ("05_planted", "failed")
    assert lesson["message"].startswith(f"In [4], line {line}: {error}")  # [1] and [2]: the parameters


@pytest.mark.nightly
def test_a_stand_in_that_does_not_compile_gives_the_reason_and_leaves_nothing(monkeypatch, tmp_path):
    python = build.interpreter()
    shutil.copytree(build.SOURCES, tmp_path / "native")
    (tmp_path / "native" / "nvidia_smi.pyc").write_bytes(b"\xff")  # as an installation leaves them
    (tmp_path / "native" / "nvml.cpp").write_text("nonsense")
    monkeypatch.setattr(build, "SOURCES", tmp_path / "native")
    monkeypatch.setenv("PERF_HELPERS_HOME", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"compiled: .*nonsense"):
        build.library(python)
    assert list(build.cache().iterdir()) == []


@pytest.mark.nightly
def test_the_command_line(tmp_path):
    words = [sys.executable, "-m", "perf_helpers.cli", "rehearse"]
    options = ["--compute-capability", "8.0", "--device-memory", "16GB", "--model", "bert-tiny", "--seq-len", "32"]
    done = subprocess.run([*words, *options, "--bf16", "--json"], capture_output=True, text=True)
    found = json.loads(done.stdout)
    assert done.returncode == 0 and found["rehearsed"] and found["reserved_bytes"] >= found["peak_bytes"] > 0
    assert sum(found["breakdown"].values()) == found["peak_bytes"] and found["step_seconds"] is None
    (tmp_path / "mine.py").write_text("def train(task):\n    import torch\n    torch.empty(20 << 30, device='cuda')\n")
    done = subprocess.run(
        [*words, "--card", "t4", "--function", f"{tmp_path}/mine.py:train"], capture_output=True, text=True
    )
    assert done.returncode == 1 and "Tried to allocate 80.00 GiB" in done.stderr
    done = subprocess.run([*words, "--card", "t4", "--", "nvidia-smi"], capture_output=True, text=True)
    assert done.returncode == 0 and "T4" in done.stdout
