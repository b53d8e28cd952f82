"""Plant mistakes that a learner or a library could make in lessons 15 and 16: the verdict, or the lesson's own
comparison, must change. The lessons' own cells are used, at small sizes.
"""

import contextlib
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from planted import verdict

from perf_helpers import slow_link
from perf_helpers.course.ledger import Verdict
from perf_helpers.lab.lab import Lab
from trainmem.core.task import Task
from trainmem.records import Ratio

SOURCES = Path(__file__).resolve().parents[2] / "notebooks" / "src"
HOLDS, REFUTED = Verdict.HOLDS, Verdict.REFUTED
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
TASK = Task("bert-tiny", seq_len=16, config=NO_DROPOUT | {"num_hidden_layers": 2, "vocab_size": 500})


def lesson(name, *needed, plant=None, **known):
    """Run some cells of a lesson and return the names that they define.

    Args:
        name: the lesson's name.
        needed: texts; the first cell with each of them is run.
        plant: (right text, wrong text) to replace in these cells; None: nothing is replaced.
        known: names that the cells can use.
    """
    cells = re.split(r"(?m)^# %%.*\n", (SOURCES / f"{name}.py").read_text("utf-8"))
    setup = next(cell for cell in cells if "import torch" in cell)
    chosen = [next(cell for cell in cells if text in cell) for text in needed]
    text = "\n".join(chosen)
    if plant:
        assert text.count(plant[0]) == 1, "what is to be replaced is not in the lesson any more"
        text = text.replace(*plant)
    names = {"__name__": "planted"}
    exec(setup[: setup.index("\nlab = ")].replace('optional_packages.offer("deepspeed")', "None"), names)
    names |= known
    exec(text, names)
    return names


@pytest.fixture
def lab(tmp_path):
    return Lab("cpu", out=tmp_path, timeout=300)


class TestSameGradients:
    """Lesson 16 finds gradients that are summed over ranks but not divided by their number, by comparing gradients.

    The losses would not show the fault, because with AdamW they hardly depend on the scale of gradients.
    """

    def value(self, lab, ranks, stage, plant=None):
        cells = ("class Traffic", "class FlatParameter", "class ShardedParameter", "def train(", "def finish(")
        names = lesson("16_zero", *cells, plant=plant)
        run = lab.run(partial(names["train"], stage=stage), task=TASK, processes=ranks, measure=("none",))
        assert run.ok, run.message
        return run

    @pytest.mark.nightly
    def test_sums_that_are_not_divided_stop_the_lesson_though_the_losses_agree(self, lab):
        one, right = self.value(lab, 1, 0), self.value(lab, 2, 2)
        wrong = self.value(lab, 2, 2, ("own = own.div_(self.ranks)", "own = own"))
        text = next(
            cell for cell in (SOURCES / "16_zero.py").read_text("utf-8").split("# %%") if "def same(run)" in cell
        )
        names = {"one": one, "torch": pytest.importorskip("torch")}
        exec(text[text.index("def same") : text.index("\nsame(runs[0])")], names)
        names["same"](right)
        losses = [
            [sum(step) / 2 for step in zip(*(rank["value"]["losses"] for rank in run.ranks), strict=True)]
            for run in (right, wrong)
        ]
        assert losses[1] == pytest.approx(losses[0], rel=5e-3)  # blind
        with pytest.raises(AssertionError, match="not close"):
            names["same"](wrong)


class TestWhatDdpSends:
    def verdicts(self, lab, plant=None, **options):
        names = lesson("15_dp_and_ddp", "class Traffic", "def early(", plant=plant)
        run = lab.run(partial(names["early"], **options), task=TASK, processes=2, measure=("none",))
        assert run.ok, run.message
        sent = run.value["bytes"] / (4 * TASK.parameters())
        return verdict("ddp-traffic", sent), verdict("ddp-overlaps", run.value["early"])

    def test_as_it_is(self, lab):
        assert self.verdicts(lab, bucket_MB=0.2) == (HOLDS, HOLDS)

    def test_everything_in_one_bucket_overlaps_with_nothing(self, lab):
        assert self.verdicts(lab, bucket_MB=1000) == (HOLDS, REFUTED)

    def test_buffers_are_no_gradients(self, lab):
        buffers = ("broadcast_buffers=False, **options)  # new", "broadcast_buffers=True, **options)  # new")
        assert self.verdicts(lab, buffers, bucket_MB=0.2) == (REFUTED, HOLDS)


class TestTwoLaws:
    """Decide lesson 15's two claims about slow links from calculated step times.

    A step takes 0.03 s over the fast link. The slow link adds time in proportion to the bytes; the late link, which has
    a long delay, adds time mostly per message. "link-matters" depends on the bytes, "sync-often" on the messages.

    `bytes_of` has the bytes that a step sends, and `stops_of` the number of messages that a step waits for. The keys of
    both are trainings: DDP of a "large" or a "small" model; and of a tiny model "plain" DDP, DDP that sends each byte
    "twice", or "sharded".
    """

    def ratios(self, bytes_of, stops_of, rate=100e6 / 8, delay=0.01):
        def run(base, added):
            return SimpleNamespace(
                step_seconds=base, timing=SimpleNamespace(all_seconds=[base + added * n for n in (0.9, 1.0, 1.1)])
            )

        over = {("fast", name): run(0.03, 0.0) for name in bytes_of}
        over |= {("slow", name): run(0.03, size / rate) for name, size in bytes_of.items()}
        over |= {("late", name): run(0.03, 5 * delay * stops_of[name] + bytes_of[name] / 1e9) for name in bytes_of}
        cell = next(c for c in (SOURCES / "15_dp_and_ddp.py").read_text("utf-8").split("# %%") if "def in_turns(" in c)
        names = {"over": over, "Ratio": Ratio}
        exec(cell[cell.index("def added(") : cell.index("\nif not missing:")], names)
        law = names["in_turns"]("slow", "large", "small")
        return law, names["in_turns"]("late", "sharded", "twice"), names["in_turns"]("slow", "sharded", "plain")

    def verdicts(self, bytes_of, stops_of):
        law, stops, by_bytes = self.ratios(bytes_of, stops_of)
        old = by_bytes.low > 1.25  # how sync-often was decided before
        return verdict("link-matters", law), verdict("sync-often", stops), old

    def test_libraries(self):
        sizes = {"large": 4.5e6, "small": 2.1e6, "plain": 0.17e6, "twice": 0.33e6, "sharded": 0.29e6}
        stops = {"large": 1, "small": 1, "plain": 1, "twice": 1, "sharded": 6}
        assert self.verdicts(sizes, stops)[:2] == (HOLDS, HOLDS)
        law, often, old = self.verdicts(sizes, stops | {"sharded": 1})  # as many bytes, and all of them at once
        assert (law, old) == (HOLDS, True) and often not in (HOLDS, Verdict.SMALLER)
        assert self.verdicts(sizes | {"large": 2.1e6}, stops)[0] not in (
            HOLDS,
            Verdict.SMALLER,
        )  # the same for any model


# Runs a command on the host whose namespaces a process keeps.
ON_HOST = """
import os, sys
from perf_helpers.lab import slow_link
with open(f"/proc/{sys.argv[1]}/ns/net") as namespace:
    slow_link._enter(namespace.fileno())
os.execvp(sys.argv[2], sys.argv[2:])
"""


@pytest.mark.nightly
@pytest.mark.skipif(slow_link.missing() is not None, reason="no link can be made here")
class TestTwoHosts:
    def test_what_arrives_later_is_waited_for_as_often_as_there_are_messages(self, lab):
        def sums(task, link, messages):
            import time

            import torch

            link.join()
            torch.distributed.init_process_group("gloo")
            torch.distributed.barrier()
            start = time.perf_counter()
            for _ in range(messages):
                torch.distributed.all_reduce(torch.ones(10))
            return time.perf_counter() - start

        with slow_link.link(delay_seconds=0.05) as link:
            for messages in (1, 4):
                run = lab.run(partial(sums, link=link, messages=messages), processes=2, measure=("none",))
                assert run.ok, run.message
                assert max(rank["value"] for rank in run.ranks) >= messages * 0.05  # it cannot be less, however quick

    @pytest.mark.nightly
    def test_the_command_that_lesson_15_shows_trains_on_two_hosts(self, tmp_path):
        text = (SOURCES / "15_dp_and_ddp.py").read_text("utf-8")
        options = re.search(r"# torchrun (--nnodes 2 .*) script\.py", text)[1]
        script = tmp_path / "script.py"
        script.write_text(re.search(r'SCRIPT = """(.*?)"""', text, re.DOTALL)[1].replace(r"\\n", r"\n"))
        with slow_link.link() as link:
            names = (
                "env",
                f"GLOO_SOCKET_IFNAME={slow_link._DEVICE}",
                "RES_OPTIONS=timeout:1 attempts:1",
                "OMP_NUM_THREADS=1",
            )
            python = (*names, sys.executable, "-m", "torch.distributed.run")
            started = []
            for host, address in enumerate(slow_link._ADDRESSES):  # no name server: who is whom has to be said
                here = f"--rdzv-conf is_host={1 - host} --local-addr {address} {script}"
                on_host = sys.executable, "-c", ON_HOST, str(link.holders[host])
                command = *on_host, *python, *options.split(), *here.split()
                started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
            reported = [process.communicate(timeout=120) for process in started]
        gradients = [re.search(r'"gradient": ([^}]+)}', output)[1] for output, errors in reported]
        assert len(gradients) == 2 and len(set(gradients)) == 1


class TestNvlink:
    def test_without_one_nothing_about_it_is_timed(self):
        cell = next(c for c in (SOURCES / "15_dp_and_ddp.py").read_text("utf-8").split("# %%\n") if "LEGEND = {" in c)

        def missing(entry):
            rows = ("\tGPU0\tGPU1\tNIC0", f"GPU0\t X \t{entry}\tSYS", f"GPU1\t{entry}\t X \tSYS", "NIC0\tSYS\tSYS\t X ")
            matrix = "\n".join(rows)
            run = SimpleNamespace(
                run=lambda *_, **__: SimpleNamespace(stdout=matrix), CalledProcessError=subprocess.CalledProcessError
            )
            names = {"re": re, "subprocess": run, "gpus2": True, "contextlib": contextlib}
            exec(cell, names)
            assert [reported for reported, _ in names["joined"]] == [entry, entry]
            return names["no_nvlink"]

        assert missing("NV2") is None
        assert missing("PHB") == missing("SYS") == "needs an NVLink between the GPUs"


class TestCarriesOver:
    def verdict(self, one, each_of_two):
        text = (SOURCES / "15_dp_and_ddp.py").read_text("utf-8")
        line = re.search(r"^helped = (.*?)(  #.*)?$", text, re.MULTILINE)[1]
        rows = [["vanilla", 1, 1, 1.0, 1.0], *([str(n), 0, 0, one, each_of_two] for n in range(5))]
        return verdict("single-gpu-carries-over", eval(line, {"rows": rows}))

    def test_methods_that_take_more_on_both_help_nobody(self):
        assert self.verdict(0.8, 0.8) is HOLDS
        assert self.verdict(1.2, 1.2) is self.verdict(0.8, 1.0) is REFUTED


class TestOffload:
    BIG = TASK.replace(config={"vocab_size": 30_000})

    def kept(self, lab, in_file, plants=()):
        names = lesson("16_zero", "def offloaded(")
        text = next(
            c for c in re.split(r"(?m)^# %%.*\n", (SOURCES / "16_zero.py").read_text("utf-8")) if "def offloaded(" in c
        )
        for right, wrong in plants:
            assert right in text
            text = text.replace(right, wrong)
        exec(text, names)
        run = lab.run(partial(names["offloaded"], in_file=in_file), task=self.BIG, measure=("none",))
        assert run.ok, run.message
        return run.value["kept"]

    def test_an_array_in_place_of_a_file_saves_nothing(self, lab):
        array = (
            'np.memmap(Path(folder, f"{name}-{number}"), np.float32, "w+", shape=tuple(weight.shape))',
            "np.zeros(tuple(weight.shape), np.float32)",
        )
        dropped = ("array.flush(), array.base.madvise(mmap.MADV_DONTNEED)", "pass")
        states = 8 * self.BIG.parameters()
        plain = self.kept(lab, False)
        start = "    at_start, model, arrays = resident("
        libraries = (start, f"    libraries = np.ones(2 * {states} // 8)\n{start}")  # a process may have imported more
        right, wrong = self.kept(lab, True, (libraries,)), self.kept(lab, True, (array, dropped))
        assert verdict("offload-to-file", (plain - right) / states) is HOLDS
        assert verdict("offload-to-file", (plain - wrong) / states) is not HOLDS  # resident memory varies

    def test_the_host_has_the_states_and_the_device_the_weights(self, lab):
        names = lesson("16_zero", "def on_the_host(", lab=SimpleNamespace(machine=SimpleNamespace(kind="cpu")))
        runs = [
            lab.run(partial(names["on_the_host"], offload=o), task=TASK, measure=("memory",), use_cpu=True)
            for o in (False, True)
        ]
        assert all(run.ok for run in runs), [run.message for run in runs]
        more = runs[1].memory.phases["forward"] - runs[0].memory.phases["forward"]
        assert more == pytest.approx(8 * TASK.parameters(), rel=0.05)  # a CPU has the host's weights and gradients too


class TestZero:
    @pytest.mark.nightly
    def test_replicas_alone_shard_nothing(self, lab):
        names = lesson("16_zero", "class Traffic", "def with_fsdp(")
        kinds = ("weights", "gradients", "optimizer_states")
        verdicts = []
        for replicas in (1, 2):
            each = partial(names["with_fsdp"], steps=2, replicas=replicas)
            run = lab.run(each, task=TASK, processes=2, measure=("memory",), use_cpu=True)
            assert run.ok, run.message
            kept = sum(run.memory.phase_breakdowns["backward"][kind] for kind in kinds) / TASK.parameters()
            verdicts.append(verdict("zero-saves", (16 - kept) / 8))
        assert verdicts == [HOLDS, REFUTED]

    def test_one_stage_that_is_faster_refutes_that_zero_only_slows(self):
        text = (SOURCES / "16_zero.py").read_text("utf-8")
        line = re.search(r"^fastest = (.*)$", text, re.MULTILINE)[1]
        for first, right in ((0.8, HOLDS), (1.3, REFUTED)):
            slower = {1: Ratio(first, first - 0.05, first + 0.05), 3: Ratio(0.4, 0.35, 0.45)}
            assert verdict("zero-slows-if-fits", eval(line, {"slower": slower})) is right

    def test_the_tree_has_an_end(self):
        names = {}
        text = (SOURCES / "16_zero.py").read_text("utf-8")
        for function in ("formula", "choose"):
            exec(re.search(rf"^def {function}\(.*?\n\n\n", text, re.MULTILINE | re.DOTALL)[0], names)
        choose = names["choose"]
        assert choose(1e9, 1)[0] == "DDP" and choose(7e9, 8)[0].startswith("stage")
        assert choose(30e9, 1)[0] == "stage 3, offload to the host"
        assert choose(1e12, 8)[0] == choose(1e12, 1)[0] == "cut the layers themselves (lesson 17)"
        assert choose(1e12, 1, largest_layer=0.001)[0] == "more cards"  # neither the host nor the disk holds it
        assert choose(30e9, 8, activations=90e9)[1] > 90e9
