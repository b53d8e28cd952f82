"""In what form an experiment is followed: in one process, with few samples, and with few layers where all are alike."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from perf_helpers.estimate import layers
from perf_helpers.estimate.operations import Trace
from perf_helpers.lab.arguments import Arguments
from perf_helpers.lab.outcomes import Invalid
from perf_helpers.lab.runs import Category
from perf_helpers.lab.task import Task
from perf_helpers.lab.training import Experiment


@dataclass(frozen=True, slots=True)
class Plan:
    """How an experiment is followed."""

    experiment: Experiment  # as it is followed, all layers: in one process, with few samples
    depth: dict[str, int]  # {field of the configuration: layers} that is extrapolated; {}: every layer is followed

    @classmethod
    def of(cls, experiment: Experiment, every_layer: bool) -> "Plan":
        """Raises Invalid where there is no such model."""
        try:
            experiment.task.model_class()
        except ValueError as error:
            raise Invalid(str(error)) from error
        plain = _with_little_data(_unsharded(_without_workers(experiment)))
        return cls(plain, {} if every_layer or experiment.function else _repeated(plain))

    def parts(self) -> list[Experiment]:
        """What is followed first: the experiment with few layers, or itself."""
        if not self.depth:
            return [self.experiment]
        task = self.experiment.task
        return [self.experiment.replace(task=task.replace(config=few)) for few in layers.few_layers(self.depth)]

    def whole(self, traces: Sequence[Trace], parameters: Callable[[Task], int]) -> Trace | None:
        """The trace of all layers from those of the parts; None where the layers turn out not to be alike.

        Args:
            parameters: how many numbers the weights of a task's model are.
        """
        base, *deeper = traces
        if not self.depth:
            return base
        full = layers.extrapolated(base, deeper, self.depth)
        return full if full and full.parameters == parameters(self.experiment.task) else None


_OF_WORKERS = ("dataloader_num_workers", "dataloader_prefetch_factor", "dataloader_persistent_workers")


def _without_workers(experiment: Experiment) -> Experiment:
    """The experiment with its batches made in the process itself: workers hold theirs elsewhere."""
    if not experiment.arguments.get("dataloader_num_workers"):
        return experiment
    return experiment.replace(arguments=experiment.arguments.without(*_OF_WORKERS))


_SHARDED = {
    "full_shard": (Category.WEIGHTS, Category.GRADIENTS, Category.OPTIMIZER_STATES),
    "shard_grad_op": (Category.GRADIENTS, Category.OPTIMIZER_STATES),
}


def shards(arguments: Arguments) -> tuple[Category, ...]:
    """The categories that the Trainer's `fsdp` divides among the ranks; () where it divides nothing."""
    given = arguments.get("fsdp") or ""
    words = given.split() if isinstance(given, str) else ["full_shard"] if given is True else [str(w) for w in given]
    return next((categories for name, categories in _SHARDED.items() if name in words), ())


def _unsharded(experiment: Experiment) -> Experiment:
    """The experiment as one process runs it, where it would be sharded: see `prediction`."""
    if not shards(experiment.arguments):
        return experiment
    names = [name for name in experiment.arguments.given if name.startswith("fsdp")]
    return experiment.replace(arguments=experiment.arguments.without(*names), processes=1)


def enough_samples(arguments: Arguments, processes: int = 1) -> int:
    """With how many samples a training is followed: those of two steps, and some left, for a batch is fetched ahead."""
    return 4 * arguments.samples_per_step(processes)


def _with_little_data(experiment: Experiment) -> Experiment:
    """The experiment with no more samples than are followed."""
    if experiment.function or not experiment.training:
        return experiment
    enough = enough_samples(experiment.arguments, experiment.processes)
    if experiment.task.dataset_size <= enough:
        return experiment
    return experiment.replace(task=experiment.task.replace(dataset_size=enough))


def _repeated(experiment: Experiment) -> dict[str, int]:
    """The depths that can be extrapolated, {field of the configuration: layers}; {} where every layer is followed.

    Followed are all layers of a model that has few, whose layers differ (a field of its configuration lists something
    for each), or where checkpoints hold several layers each.
    """
    config = experiment.task.build_config()
    depth = layers.depths(config)
    differ = any(
        isinstance(value, list) and len(value) in depth.values() and len({str(item) for item in value}) > 1
        for value in config.to_dict().values()
    )
    options = experiment.arguments.get("gradient_checkpointing_kwargs") or {}
    if differ or options.get("every_n_layers", 1) > 1:
        return {}
    return depth if max(depth.values(), default=0) > 3 else {}
