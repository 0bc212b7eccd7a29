"""What is trained. Only commands and config keys that users know, so that any version of the package can be asked."""

from __future__ import annotations

from dataclasses import dataclass

SHORT = ["data.limit=200", "optim.batch_size=40", "optim.iterations=24", "log.every=4", "log.evaluate_every=12",
         "log.checkpoint_every=8"]  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A command and its config keys; {data} is the folder of `data.py`, {runs} that of the finished runs.

    The command `fit` is a call from Python, in `fit.py`. `cut`: it is also killed after its first checkpoint, and the
    other version goes on. `ranks`: on so many processes. `equals`: its weights must be those of another case.
    `since`: the commit that changed its bits last, if later than the one that the others are compared with.
    """

    name: str
    keys: list[str]
    command: str = "train"
    ranks: int = 1
    cut: bool = False
    equals: str | None = None
    since: str | None = None
    short: bool = True

    @property
    def has_outputs(self) -> bool:
        """Whether its run can be asked for what it answers to its test set."""
        return self.command in ("train", "fit") and self.name != "detection"

    @property
    def args(self) -> list[str]:
        return self.keys + (SHORT if self.short else [])


DROPOUT = ["digits", "model=nets:with_dropout", "members=3", "split=conv", "loss=mcl", "sampling=bagging"]
NORMS = ["digits", "model=nets:with_batchnorm", "members=2", "split=conv2", "optim.accumulate=2"]
TREE = ["digits", "members=4", "split={conv1: [2, {conv2: 2}]}", "loss=mcl", "loss.k=2", "engine.micro_batches=4"]
WIDE = ["digits", "members=5", "split=conv2", "loss=mcl", "engine.micro_batches=3", "engine.stack=never"]
ADDED_IN_PAIRS = "e576da0"  # the gradients of children at a split
PIECES = [*TREE, "engine.shared_micro_batches=8", "engine.stack=never"]
CUT_BY_PIECES = "17c7548"  # shared stages
PLAIN = ["digits", "members=3"]

CASES = [
    Case("independent", [*PLAIN, "optim.name=adamw", "optim.lr=0.002", "optim.schedule=cosine"], cut=True),
    Case("dropout", [*DROPOUT, "engine.workers=1"], cut=True),
    Case("dropout_workers", [*DROPOUT, "engine.workers=3"], equals="dropout"),
    Case("dropout_ranks", DROPOUT, ranks=2, equals="dropout"),
    Case("batchnorm", NORMS, cut=True),
    Case("batchnorm_ranks", NORMS, ranks=2, equals="batchnorm"),
    Case("tree", [*TREE, "optim.clip=1.0"], cut=True),
    Case("tree_ranks", [*TREE, "optim.clip=1.0"], ranks=3, equals="tree", cut=True),
    Case("wide_split", WIDE, cut=True, since=ADDED_IN_PAIRS),
    Case("wide_split_ranks", WIDE, ranks=2, equals="wide_split", since=ADDED_IN_PAIRS),
    Case("pieces", PIECES, cut=True, since=CUT_BY_PIECES),
    Case("pieces_ranks", PIECES, ranks=3, equals="pieces", since=CUT_BY_PIECES),
    Case("residual", ["digits", "model=nets:Residual", "members=3", "split=first", "loss=mcl"], cut=True),
    Case("score_averaged", [*PLAIN, "split=conv1", "loss=score_averaged"]),
    Case("prob_averaged", [*PLAIN, "split=conv1", "loss=prob_averaged", "optim.nesterov=true"]),
    Case("relaxed", [*PLAIN, "loss=relaxed", "loss.normalize=wins", "optim.name=rmsprop", "optim.lr=0.001"]),
    Case("evolving", [*PLAIN, "loss=evolving", "optim.name=adam", "optim.lr=0.002"], cut=True),
    Case("annealed", [*PLAIN, "loss=annealed", "optim.name=adagrad"]),
    Case("confident", [*PLAIN, "split=conv2", "loss=confident", "sampling=subset"]),
    Case("scored", [*PLAIN, "split=conv2", "loss=scored", "optim.caffe_momentum=true"], cut=True),
    Case("own_loss", [*PLAIN, "loss=nets:bounded", "loss.args={bound: 1.5}", "sampling=bagging"], cut=True),
    Case("pretrain", [*PLAIN, "loss=mcl", "pretrain=12", "data.pad=1", "data.mirror=true"], cut=True),
    Case("specialists", [*PLAIN, "sampling=specialists", "loss=mcl", "loss.ce_weight=0.1"]),
    Case("regression", ["diabetes", "loss=mcl", "loss.of=smooth_l1"], cut=True),
    Case("labels", ["digits", "members=2", "model=nets:labels", "data.name=npz",
                    "data.path={data}/labels.npz", "data.problem=multilabel", "data.normalize=mean_std"], cut=True),
    Case("pixels", ["digits", "members=2", "model=nets:pixels", "data.name=npz", "data.path={data}/pixels.npz",
                    "loss=mcl"], cut=True),
    Case("soft", ["digits", "members=2", "data.name=npz", "data.path={data}/soft.npz"], cut=True),
    Case("frozen", [*PLAIN, "init={runs}/independent", "freeze=[conv1]", "init_members=[0, 2, 1]"]),
    Case("detection", [
        "fast_rcnn", "model_args={base: 'nets:little', classes: 3}", "freeze=[]", "data.path={data}/scenes",
        "data.regions.objects=[red, green, blue]", "data.regions.proposals={data}/scenes/proposals.npz",
        "data.regions.short_side=96", "data.regions.long_side=120", "data.regions.per_image=24",
        "data.normalize=mean_std", "data.scale=auto", "members=3", "split=conv2", "optim.iterations=8", "optim.lr=0.05",
        "optim.schedule.name=constant", "log.every=1", "log.checkpoint_every=4", "log.evaluate_every=4",
    ], cut=True, short=False),
    Case("caffe", ["{data}/net.prototxt", "--solver", "{data}/solver.prototxt", "members=2"], cut=True, short=False),
    Case("classical", ["digits", "members=2", "--rounds", "2"], command="classical"),
    Case("student", ["{runs}/tree"], command="distil"),
    Case("fit", [], command="fit", cut=True, short=False),
]  # fmt: skip
