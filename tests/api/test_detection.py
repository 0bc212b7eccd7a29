"""Detection: from annotated images to tables, through the engine, on ranks, and after a kill."""

import json
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.commands import assert_same_run, process, ranks
from helpers.one_step import engine_gradients
from helpers.painted_scenes import COLOURS, annotate, keys, paint
from PIL import Image

from mheads import losses
from mheads.api.run import load
from mheads.common.errors import UserError
from mheads.common.progress import Silent
from mheads.config import read as configs
from mheads.data.batches import BatchStream, Reader
from mheads.data.data_section import RegionOptions
from mheads.data.detection.regions import label_regions
from mheads.problems import boxes as box
from mheads.problems.average_precision import average_precisions, matches
from mheads.problems.detection import FLOOR, MOST, SUPPRESS
from mheads.runs.folder import RunFolder
from mheads.training.build_from_config import load_data
from mheads.training.experiment import build_experiment
from mheads.training.loop import train_config


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    return paint(tmp_path_factory.mktemp("painted") / "VOC")


@pytest.fixture(scope="module")
def experiment(scenes):
    return build_experiment(configs.load("fast_rcnn", keys(scenes)))


def batch_of(experiment, step=0):
    stream = BatchStream(experiment.data, 0, 4, experiment.net.num_members, None)
    try:
        return stream.read(step)
    finally:
        stream.close()


# What a step is given.


def test_regions_are_drawn_by_the_rules_of_fast_rcnn(experiment):
    data, drawing = experiment.data, experiment.data.train.drawing
    for step in range(6):
        classes, _, boxes, numbers = batch_of(experiment, step).targets
        for number in numbers.unique().tolist():
            own = numbers == number
            truth = data.problem.truths[number]
            best = max_overlaps(boxes[own].numpy(), truth.boxes, mirrored=truth.width)
            objects = classes[own] > 0
            assert own.sum() <= drawing.per_image and objects.sum() <= round(0.25 * drawing.per_image)
            assert (best[objects.numpy()] >= 0.5).all()
            assert ((best[~objects.numpy()] >= 0.1) & (best[~objects.numpy()] < 0.5)).all()


def max_overlaps(found, truths, mirrored):
    """With the objects, in the image or turned, whichever is nearer."""
    return np.maximum(box.overlaps(found, truths).max(1), box.overlaps(found, box.mirror(truths, mirrored)).max(1))


def test_pixels_regions_and_box_targets_are_mirrored_together(experiment):
    """Turned by its target, a region of an object must enclose the colour of its class and little else."""
    problem = experiment.data.problem
    means, deviations = np.array(problem.means), np.array(problem.deviations)
    turned = set()
    for step in range(8):
        batch = batch_of(experiment, step)
        classes, deltas, boxes, numbers = (t.numpy() for t in batch.targets)
        image = np.repeat(np.arange(len(batch.counts)), batch.counts)
        pixels, sizes = (t.numpy() for t in batch.inputs)
        for r in np.flatnonzero(classes > 0):
            c = classes[r]
            truth = problem.truths[numbers[r]]
            target = box.decode(boxes[r].astype(float), deltas[r] * deviations[c] + means[c])
            scale = sizes[image[r], 1] / truth.width
            left, top, right, bottom = np.round((target + np.array([0, 0, 1, 1])) * scale).astype(int)
            inside = pixels[image[r], top + 2 : bottom - 2, left + 2 : right - 2].reshape(-1, 3)
            colour = np.array(COLOURS[problem.classes[c - 1]])
            assert (np.abs(inside - colour).max(1) < 40).mean() > 0.9
            turned.add(bool(np.abs(target - truth.boxes).max(1).min() > 1))  # the object is elsewhere in the file
    assert turned == {True, False}


def test_difficult_objects_are_neither_learned_nor_background():
    from mheads.data.detection.voc import Scene
    from mheads.problems.average_precision import Truth

    objects = np.array([[0.0, 0, 19, 19], [40, 0, 59, 19]])
    scene = Scene("s", None, Truth(objects, np.array([1, 2]), np.array([False, True]), 100, 50))
    proposed = np.array(
        [[0, 0, 19, 19], [1, 0, 19, 9], [0, 0, 19, 60], [40, 0, 59, 18], [40, 0, 59, 60], [80, 30, 90, 40]]
    )
    boxes, classes, deltas = label_regions(scene, proposed, RegionOptions(), with_truth=True)
    assert len(boxes) == 7 and np.array_equal(boxes[0], objects[0])  # the one that is not difficult joins
    assert classes.tolist() == [1, 1, 0, 0, -1, -1, -1]  # itself, a hit, two near; on a difficult one; near it; far
    assert np.abs(deltas[:2]).max() == 0


def test_statistics_of_box_targets_bring_them_to_mean_0_and_deviation_1(experiment):
    train, problem = experiment.data.train, experiment.data.problem
    for c in range(1, 4):
        parts = []
        for scene, proposed in zip(train.scenes, train.proposed, strict=True):
            _, classes, deltas = label_regions(scene, proposed, train.drawing, with_truth=True)
            parts += [deltas[classes == c], deltas[classes == c] * [-1, 1, 1, 1]]
        found = (np.concatenate(parts) - problem.means[c]) / problem.deviations[c]
        np.testing.assert_allclose(found.mean(0), 0, atol=1e-9)
        np.testing.assert_allclose(found.std(0), 1, atol=1e-9)


def test_images_keep_their_ratio_within_the_sides():
    drawing = RegionOptions(short_side=600, long_side=1000)
    assert drawing.scale(500, 375) == 1.6
    assert drawing.scale(1000, 200) == 1.0
    assert drawing.scale(300, 300) == 2.0


def test_a_batch_of_images_cut_to_one_is_that_image_alone(experiment):
    batch = batch_of(experiment)
    whole = batch.network_inputs(torch.float32)
    for i in range(4):
        alone = batch.cut(i, i + 1).network_inputs(torch.float32)
        height, width = alone.shape[2:]
        assert (height, width) == tuple(batch.inputs[1][i].tolist())
        assert torch.equal(whole[i, :, :height, :width], alone[0])
        assert not whole[i, :, height:].any() and not whole[i, :, :, width:].any()


# The step.


@pytest.mark.parametrize("split", [None, "conv1", "conv2", "fc"])
@pytest.mark.parametrize("loss", ["independent", "mcl"])
def test_gradients_are_those_of_autograd(scenes, split, loss):
    config = configs.load("fast_rcnn", [*keys(scenes, split=split or "null"), f"loss={loss}"])
    experiment = build_experiment(config)
    net = experiment.net.double()
    for module in net.modules():
        if hasattr(module, "p"):
            module.p = 0.0
    batch = batch_of(experiment)
    report, found = engine_gradients(net, experiment.loss, batch, micro_batches=4)
    total = torch.zeros((), dtype=torch.float64)
    for i in range(4):  # images of their own size, one after the other
        part = batch.cut(i, i + 1)
        outputs = net(part.network_inputs(torch.float64), part.side_inputs())
        total = total + experiment.loss(outputs, part.targets, None, part.ties).total
    (total / batch.num_rows).backward()
    assert report.loss == pytest.approx(total.item() / batch.num_rows, rel=1e-12)
    for name, stage in net.stages.items():
        for got, parameter in zip(found[name], stage.parameters(), strict=True):
            torch.testing.assert_close(got, parameter.grad, rtol=1e-9, atol=1e-12)


def test_pieces_of_a_batch_of_images_are_refused_because_their_regions_cannot_be_joined(scenes, mheads, tmp_path):
    cut = ["engine.micro_batches=2", "engine.shared_micro_batches=4", "split=conv2"]
    done = mheads("train", "fast_rcnn", *keys(scenes), *cut, "--run", tmp_path / "run")
    assert done.code == 2 and not (tmp_path / "run").exists()
    assert "shared_micro_batches is 4" in done.err and "takes side inputs (counts, " in done.err


def test_the_loss_is_cross_entropy_and_smooth_l1_of_the_class(experiment):
    generator = np.random.default_rng(0)
    scores, deltas = generator.normal(size=(2, 5, 4)), 2 * generator.normal(size=(2, 5, 16))
    classes, wanted = np.array([0, 3, 1, 0, 2]), generator.normal(size=(5, 4))
    expected = np.zeros((2, 5))
    for m in range(2):
        for i, c in enumerate(classes):
            expected[m, i] = np.log(np.exp(scores[m, i]).sum()) - scores[m, i, c]
            if c:
                far = np.abs(deltas[m, i, 4 * c : 4 * c + 4] - wanted[i])
                expected[m, i] += np.where(far < 1, far**2 / 2, far - 0.5).sum()
    outputs = torch.from_numpy(scores).requires_grad_(), torch.from_numpy(deltas).requires_grad_()
    targets = (torch.from_numpy(classes), torch.from_numpy(wanted), torch.zeros(5, 4), torch.zeros(5).long())
    found = experiment.data.problem.losses(outputs, targets)
    np.testing.assert_allclose(found.detach().numpy(), expected, rtol=1e-12)
    assert torch.autograd.gradcheck(lambda *o: experiment.data.problem.losses(o, targets), outputs)
    without = losses.independent({"name": "fast_rcnn", "box_weight": 0.0})(outputs, targets).losses
    torch.testing.assert_close(without, losses.independent()(outputs[0], targets[0]).losses)


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("loss=prob_averaged", "prob_averaged is about the probabilities of classes alone, and detection learns more"),
        ("loss=confident", "confident is about the probabilities of classes alone"),
        ("loss=scored", "scored is not for detection"),
        ("sampling=specialists", "specialists deals out examples by their class, and an image has objects of several"),
    ],
)
def test_losses_and_samplings_that_mean_nothing_here_are_refused(scenes, key, words):
    with pytest.raises(UserError, match=words):
        build_experiment(configs.load("fast_rcnn", [*keys(scenes), key]))


def test_rounds_that_share_out_images_are_refused_before_any(scenes, mheads, tmp_path):
    done = mheads("classical", "fast_rcnn", *keys(scenes), "--rounds", 2, "-f", tmp_path / "rounds")
    assert done.code == 2 and "examples of several rows each: these cannot go to one member or another" in done.err
    assert not (tmp_path / "rounds").exists()


# What is measured.


def test_the_result_is_that_of_a_plain_computation(experiment):
    """Softmax, decoding, suppression and precision, one box at a time; with means of probabilities and of boxes."""
    data, problem = experiment.data, experiment.data.problem
    generator = torch.Generator().manual_seed(0)
    metrics, seen = problem.metrics(2), []
    for i in range(len(data.test)):
        batch = Reader(data.test, data.preprocess, np.array([i]))()
        answers = torch.randn(2, batch.num_rows, 4 * 5, generator=generator)
        answers[..., :4] += 3 * torch.nn.functional.one_hot(batch.targets[0], 4)
        metrics.update(answers, batch.targets)
        seen.append((answers.double().numpy(), [t.numpy() for t in batch.targets]))
    result = metrics.result()
    for which in ("regressed", "proposals"):
        for a, mine in (
            (0, result.classes[which]["11-point"]["members"][0]),
            (2, result.classes[which]["11-point"]["ensemble_mean"]),
        ):
            for c in range(3):
                expected = plainly(seen, problem, which, a, c + 1)
                assert mine[c] == pytest.approx(expected, nan_ok=True)
    assert result.members[0] == pytest.approx(np.nanmean(result.classes["regressed"]["11-point"]["members"][0]))
    assert result.oracle >= result.members[0] and result.examples == len(data.test)
    assert np.sum(result.ownership) == sum(len(targets[0]) for _, targets in seen)


def test_the_oracle_stands_beside_what_it_makes_of_chance(experiment):
    """Answers that have nothing to do with the regions: what looks at the truth makes much of them all the same."""
    data, problem = experiment.data, experiment.data.problem
    generator = torch.Generator().manual_seed(0)
    known, random = problem.metrics(4), problem.metrics(4)
    for i in range(len(data.test)):
        batch = Reader(data.test, data.preprocess, np.array([i]))()
        answers = torch.randn(4, batch.num_rows, 4 * 5, generator=generator)
        random.update(answers, batch.targets)
        answers[..., :4] += 6 * torch.nn.functional.one_hot(batch.targets[0], 4)
        known.update(answers, batch.targets)
    known, random = known.result(), random.result()
    assert random.oracle > random.single + 10  # which is why it needs its chance
    assert random.oracle_chance == pytest.approx(random.oracle, abs=0.25 * random.oracle)
    assert known.oracle_chance <= known.oracle
    assert f"Oracle by chance', '{known.oracle_chance:.2f} %" in str(problem.rows(known.to_dict()))
    assert known.headline()["Oracle"] == f"{known.oracle:.2f} (by chance {known.oracle_chance:.2f})"


def plainly(seen, problem, which, predictor, c):
    scores, hits, count, first = [], [], 0, 0
    for answers, (_, _, regions, numbers) in seen:
        truth = problem.truths[numbers[0]]
        size = truth.width, truth.height
        odds = np.exp(answers[..., :4])
        probabilities = (odds / odds.sum(-1, keepdims=True))[..., c]
        deltas = answers[..., 4 + 4 * c : 8 + 4 * c] * problem.deviations[c] + np.array(problem.means[c])
        found = np.stack([box.clip(box.decode(regions.astype(float), d), *size) for d in deltas])
        if predictor == 2:
            probabilities, found = probabilities.mean(0), found.mean(0)
        else:
            probabilities, found = probabilities[predictor], found[predictor]
        if which == "proposals":
            found = regions.astype(float)
        kept = []
        for i in sorted(range(len(found)), key=lambda i: -probabilities[i])[:MOST]:
            near = [box.overlaps(found[i, None], found[j, None])[0, 0] for j in kept]
            if probabilities[i] >= FLOOR and all(overlap <= SUPPRESS for overlap in near):
                kept.append(i)
        found_here = matches(found[kept], c, truth)
        scores += probabilities[kept].tolist()
        hits += [hit + first if hit >= 0 else hit for hit in found_here]
        first += len(truth.boxes)
        count += int((truth.classes == c).sum())
    return average_precisions(np.array(scores), np.array(hits, np.int64), count)["11-point"]


# The commands.


@pytest.fixture(scope="module")
def run(scenes, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "one"
    done = process("detect", "train", *keys(scenes), "engine.workers=1", "-f", folder)
    assert done.code == 0, done.err
    return folder


def test_a_detector_is_killed_and_spread_over_ranks_with_the_same_bits(scenes, run, tmp_path):
    command = ("detect", "train", *keys(scenes), "-f")
    killed = process(*command, tmp_path / "killed", stop=(signal.SIGKILL, "os.rename", "step-00000008"))
    assert killed.code == -signal.SIGKILL
    assert process(*command, tmp_path / "killed").code == 0
    assert_same_run(tmp_path / "killed", run)
    stop = (signal.SIGKILL, "os.rename", "step-00000008")
    done = ranks(2, *command, tmp_path / "ranks", stop={0: stop})
    assert -signal.SIGKILL in [one.code for one in done]
    done = ranks(2, *command, tmp_path / "ranks")
    assert [one.code for one in done] == [0, 0], done[0].err
    assert_same_run(tmp_path / "ranks", run)
    done = ranks(2, *command, tmp_path / "replicas", "placement={trunk: 0, conv2/0: 0, conv2/1: 0, conv2/2: 0}")
    assert [one.code for one in done] == [0, 0], done[0].err
    assert_same_run(tmp_path / "replicas", run)


def test_a_detector_learns_and_is_measured_and_shown(scenes, tmp_path):
    folder = tmp_path / "run"
    more = {
        "optim.iterations": 300,
        "optim.name": "adamw",
        "optim.lr": 0.003,
        "log.evaluate_every": 0,
        "log.checkpoint_every": 0,
        "members": 2,
    }
    assert process("detect", "train", *keys(scenes, **more), "-f", folder).code == 0
    result = json.loads((folder / "result.json").read_text())
    assert result["ensemble_mean"] >= 80 and result["further"]["proposals"]["11-point"]["ensemble_mean"] >= 60
    done = process("detect", "eval", folder, "--trust")
    assert done.code == 0, done.err
    assert "11-point, regressed boxes" in done.out and f"{result['ensemble_mean']:.2f}" in done.out
    assert "paper" not in done.out  # which has other classes
    again = process(
        "detect", "eval", folder, "--trust", "--split", "test", "--boxes", "proposals", "--measure", "all-point"
    )
    figure = result["further"]["proposals"]["all-point"]["ensemble_mean"]
    assert again.code == 0 and "all-point, boxes as proposed" in again.out and f"{figure:.2f}" in again.out
    against = process("detect", "eval", folder, "--against", folder, "--trust")
    assert "a difference of +0.00 points, not to be told from chance" in " ".join(against.out.split())
    image = scenes / "JPEGImages" / "000010.png"
    proposals = scenes / "proposals.npz"
    done = process("detect", "show", folder, image, "-o", tmp_path / "a.png", "--trust", "--proposals", proposals)
    assert done.code == 0, done.err
    assert "member 1" in done.out and "Ensemble-Mean" in done.out
    with Image.open(tmp_path / "a.png") as picture:
        assert picture.width > 500


def test_objects_of_one_class_are_found_by_a_detector_from_a_run_with_its_weights_and_means(scenes, tmp_path):
    generator = np.random.default_rng(0)
    x = generator.integers(0, 255, (24, 40, 40, 3)).astype(np.uint8).transpose(0, 3, 1, 2)
    np.savez(tmp_path / "d.npz", x_train=x, y_train=np.arange(24) % 3, x_test=x, y_test=np.arange(24) % 3)
    donor = tmp_path / "donor"
    train = ["model=user_networks:little40", f"data={{name: npz, path: {tmp_path / 'd.npz'}, normalize: mean_image}}"]
    done = process("train", "digits", *train, "members=2", "split=conv1", "optim.iterations=2", "-f", donor)
    assert done.code == 0, done.err
    given = [
        key
        for key in keys(scenes)
        if key.split("=")[0] not in ("members", "split", "model_args", "data.normalize", "data.scale")
    ]
    folder = tmp_path / "detector"
    done = process(
        "detect",
        "train",
        "--from",
        donor,
        *given,
        "model_args.classes=3",
        "optim.lr=1e-9",
        "optim.weight_decay=0",
        "-f",
        folder,
    )
    assert done.code == 0, done.err
    from safetensors.numpy import load_file

    before, after = load_file(donor / "model.safetensors"), load_file(folder / "model.safetensors")
    for name in ("stages.trunk.conv1.weight", "stages.conv1/1.conv2.weight", "stages.conv1/0.fc.bias"):
        np.testing.assert_allclose(after[name], before[name], atol=1e-6)
    assert not any("out." in name for name in after) and after["stages.conv1/0.detect.boxes.weight"].shape == (16, 32)
    data = load_file(folder / "data.safetensors")
    np.testing.assert_allclose(data["mean"].ravel(), (x / 255).mean((0, 2, 3)), rtol=1e-5)
    donor.rename(tmp_path / "elsewhere")  # what it started from is not needed any more
    again = process("detect", "eval", folder, "--split", "test", "--trust")
    assert again.code == 0 and "4 images of test" not in again.err, again.err


def test_a_detector_is_measured_on_other_images_that_are_only_for_testing(scenes, run, tmp_path, monkeypatch):
    """From another folder, too: the proposals of training were given by a path from where it began."""
    paint(tmp_path / "2007", seed=3)
    (tmp_path / "2007/ImageSets/Main/trainval.txt").unlink()
    monkeypatch.chdir(tmp_path)
    other = ["--data", "data.path='2007'", "--data", "data.regions.proposals=2007/proposals.npz"]
    done = process("detect", "eval", run, *other, "--data", "data.regions.strict=true", "--trust")
    assert done.code == 0 and "average precision in %" in done.out, done.err


def test_a_detector_starts_from_colour(tmp_path, mheads):
    done = mheads("train", "digits", "optim.iterations=1", "-f", tmp_path / "grey")
    assert done.code == 0, done.err
    done = mheads("detect", "train", "--from", tmp_path / "grey", "-f", tmp_path / "run")
    assert done.code == 2 and "trained on examples of 1 channel, and a detector reads colour" in done.err


def test_paths_are_taken_as_they_are(tmp_path):
    from mheads.api.detector_config import make_detector_overrides

    given = make_detector_overrides(None, Path("2007"), "{part} #1: x.npz", [])
    found = configs.load("fast_rcnn", given).data
    assert found.path == Path("2007").absolute()
    assert found.regions.proposals == str(Path("{part} #1: x.npz").absolute())


def test_a_test_image_that_cannot_be_read_costs_no_training(scenes, tmp_path, monkeypatch):
    """Found out only in the last evaluation: the weights are there, and the same command goes on."""
    from mheads.data.detection import regions

    whole = regions.decode_image
    test = [f"{i:06}.png" for i in range(8, 12)]

    def torn(path, size=None):
        if path.name in test:
            raise UserError(f"{path} cannot be decoded")
        return whole(path, size)

    given = keys(scenes, **{"log.evaluate_every": 0, "log.checkpoint_every": 0, "optim.iterations": 2})
    config = configs.load("fast_rcnn", given)
    folder = RunFolder(tmp_path / "run")
    monkeypatch.setattr(regions, "decode_image", torn)
    with pytest.raises(UserError, match="cannot be decoded"):
        train_config(config, folder, Silent())
    assert [path.name for path in folder.checkpoints.iterdir()] == ["step-00000002"]
    monkeypatch.undo()
    assert train_config(config, folder, Silent())["iterations"] == 2


def test_a_paired_test_of_equal_differences_says_nothing():
    from mheads.cli.printing.detector_tables import verdict
    from mheads.suites.detectors import Precisions, compare

    classes = ("a", "b", "c")
    one, two = (Precisions(classes, np.array([[10.0, 20, 30]]) + plus) for plus in (0, 10))
    test = compare(one, two)
    assert test.mean == -10 and np.isnan(test.p)
    assert "the same in each of the 3 classes: a paired test says nothing of it" in verdict(one, two, test)
    three = Precisions(classes, np.array([[11.0, 23, 32]]))
    differences = np.array([1.0, 3, 2])
    t = differences.mean() / (differences.std(ddof=1) / 3**0.5)
    from scipy.stats import t as student

    assert compare(three, one).p == pytest.approx(2 * student.sf(t, 2))


def test_a_suite_trains_detectors_from_runs_of_another_recipe(scenes, tmp_path, monkeypatch):
    generator = np.random.default_rng(0)
    x = generator.integers(0, 255, (24, 3, 40, 40)).astype(np.uint8)
    np.savez(tmp_path / "d.npz", x_train=x, y_train=np.arange(24) % 3, x_test=x, y_test=np.arange(24) % 3)
    (tmp_path / "photos.yaml").write_text(
        f"model: user_networks:little40\nmembers: 2\ndata: {{name: npz, path: {tmp_path / 'd.npz'}}}\n"
        "optim: {iterations: 2}\n"
    )
    (tmp_path / "first.yaml").write_text("rows:\n  - {name: tree, set: [split=conv1]}\n")
    more = {"model_args": "{base: 'user_networks:little40', classes: 3}", "members": 2, "optim.iterations": 2}
    tree = configs.load("fast_rcnn", keys(scenes, **more, split="null"))
    (tmp_path / "objects.yaml").write_text(tree.to_yaml())
    (tmp_path / "second.yaml").write_text(
        "recipe: objects.yaml\nmetrics: [ensemble_mean, on_proposals]\nrows:\n"
        "  - {name: tree, set: [split=conv1, 'init=<run:photos.yaml:first.yaml/tree>', data.normalize=init]}\n"
        "  - {name: single, from: tree, metrics: {ensemble_mean: single, on_proposals: single_on_proposals}}\n"
    )
    monkeypatch.chdir(tmp_path)
    done = process("reproduce", "second.yaml")
    assert done.code == 0, done.err
    (found,) = (json.loads(path.read_text()) for path in (tmp_path / "results").glob("second*.json"))
    result = found["runs"]["tree"][0]["result"]
    assert {"ensemble_mean", "on_proposals", "single_on_proposals"} <= result.keys()
    assert (tmp_path / "runs/reproduce/photos/tree-seed0/result.json").is_file()
    assert "init=runs/reproduce/photos/tree-seed0" in found["runs"]["tree"][0]["command"]
    assert "0 runs to train, 2 finished" in process("reproduce", "second.yaml").out


# What may be wrong with the files.


def complaints(root, **more):
    config = configs.load("fast_rcnn", keys(root, **more))
    with pytest.warns(UserWarning) as said:
        data = load_data(config)
    return data, str(said[0].message)


@pytest.fixture
def broken(tmp_path):
    return paint(tmp_path / "VOC", count=6, test=2)


def _xml(root):
    (root / "Annotations/000001.xml").write_text("<annotation><object>")


def _no_xml(root):
    (root / "Annotations/000001.xml").unlink()


def _outside(root):
    annotate(root, "000001", [("red", (10, 5, 400, 40)), ("blue", (1, 1, 20, 20))], 48, 60)


def _nowhere(root):
    annotate(root, "000001", [("red", (300, 5, 400, 40)), ("blue", (1, 1, 20, 20))], 48, 60)


def _no_number(root):
    annotate(root, "000001", [("red", ("x", 5, 40, 40)), ("blue", (1, 1, 20, 20))], 48, 60)


def _unknown(root):
    annotate(root, "000001", [("zebra", (10, 5, 40, 40)), ("blue", (1, 1, 20, 20))], 48, 60)


def _encoding(root):
    (root / "Annotations/000001.xml").write_text('<?xml version="1.0" encoding="gb2312"?><annotation/>')


def _scaled(root):
    with Image.open(root / "JPEGImages/000001.png") as image:
        image.resize((96, 120)).save(root / "JPEGImages/000001.png")


def _flag(root):
    annotate(root, "000001", [("red", (10, 5, 40, 40)), ("blue", (1, 1, 20, 20))], 48, 60)
    file = root / "Annotations/000001.xml"
    file.write_text(file.read_text().replace("<difficult>0<", "<difficult>perhaps<", 1))


def _missing(root):
    (root / "JPEGImages/000001.png").unlink()


def _no_image(root):
    (root / "JPEGImages/000001.png").write_bytes(b"not an image")


def _torn(root):
    file = root / "JPEGImages/000001.png"
    file.write_bytes(file.read_bytes()[: file.stat().st_size * 2 // 3])


def _elsewhere(root):
    with np.load(root / "proposals.npz") as arrays:
        kept = {name: arrays[name] for name in arrays.files}
    kept["000001"][:3] += 1000
    np.savez(root / "proposals.npz", **kept)


def _twice(root):
    with (root / "ImageSets/Main/trainval.txt").open("a") as file:
        file.write("000001\n")


def _no_object(root):
    annotate(root, "000001", [], 48, 60)


def _no_proposal(root):
    with np.load(root / "proposals.npz") as arrays:
        kept = {name: arrays[name] for name in arrays.files if name not in ("000001", "000005")}
    np.savez(root / "proposals.npz", **kept)


@pytest.mark.parametrize(
    ("damage", "words", "images"),
    [
        (_xml, r"000001\.xml is not XML .*: the image is left out", 3),
        (_no_xml, r"000001\.xml is missing: the image is left out", 3),
        (_outside, r"000001\.xml, object 1: its box reaches beyond the image of 48 x 60; cut to it", 4),
        (_nowhere, r"000001\.xml, object 1: its box \[300.0, .*\] is no part of an image of 48 x 60; left out", 4),
        (_no_number, r"000001\.xml, object 1: xmin of its box is 'x'; left out", 4),
        (_unknown, r"000001\.xml, object 1: the class 'zebra' is not known .*; left out", 4),
        (_encoding, r"000001\.xml is not XML that can be read \(multi-byte .*\): the image is left out", 3),
        (_scaled, r"000001\.xml says that the image has 48 x 60 pixels, and it has 96 x 120: its boxes", 4),
        (_flag, r"000001\.xml, object 1: difficult is 'perhaps', neither 0 nor 1; left out", 4),
        (_missing, r"000001\.jpg is missing: the image is left out", 3),
        (_no_image, r"000001\.png cannot be decoded .*: the image is left out", 3),
        (_torn, r"000001\.png cannot be decoded .*: the image is left out", 3),
        (_elsewhere, r"000001\.png: 3 of its \d+ proposals lie outside of its 48 x 60 pixels and are left out", 4),
        (_twice, r"trainval\.txt names 000001 more than once: it is taken once", 4),
        (_no_object, r"000001\.png has no object to learn: left out of training", 3),
        (_no_proposal, r"000001\.png has no proposal: it is learned from its objects alone", 4),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_wrong_is_said_with_the_file_and_the_rest_goes_on_unless_strict(broken, damage, words, images):
    damage(broken)
    data, said = complaints(broken)
    with pytest.raises(UserError, match=words):
        raise UserError(said)
    assert len(data.train) == images and len(data.test) == 2 and "1 things" not in said
    with pytest.raises(UserError, match=words):
        load_data(configs.load("fast_rcnn", keys(broken, **{"data.regions.strict": "true"})))


def test_lists_flags_and_names_as_other_tools_write_them(broken):
    """A list from Windows with the mark of its encoding, a flag in words, an image in capitals."""
    (broken / "ImageSets/Main/trainval.txt").write_bytes(b"\xef\xbb\xbf000000 1\r\n\r\n000001 -1\r\n")
    for name in ("000000", "000001"):
        file = broken / f"Annotations/{name}.xml"
        file.write_text(file.read_text().replace("<difficult>0<", "<difficult> False <"))
    with Image.open(broken / "JPEGImages/000001.png") as image:
        image.save(broken / "JPEGImages/000001.PNG")
    (broken / "JPEGImages/000001.png").unlink()
    data = load_data(configs.load("fast_rcnn", keys(broken)))
    assert [scene.name for scene in data.train.scenes] == ["000000", "000001"]
    assert not any(scene.truth.difficult.any() for scene in data.train.scenes)


def test_names_with_spaces_and_suffixes(broken):
    for old, new in (("000000", "my cat 0"), ("000001", "my dog")):
        (broken / f"JPEGImages/{old}.png").rename(broken / f"JPEGImages/{new}.png")
        (broken / f"Annotations/{old}.xml").rename(broken / f"Annotations/{new}.xml")
    (broken / "ImageSets/Main/trainval.txt").write_text("my cat 0 1\nmy dog  -1\n000002.png\n")
    data, said = complaints(broken, **{"data.regions.with_objects": "true"})
    assert [scene.name for scene in data.train.scenes] == ["my cat 0", "my dog", "000002"]
    assert "my dog.png has no proposal: it is learned from its objects alone" in said


def test_many_complaints_are_counted_and_kept(broken, tmp_path, monkeypatch):
    monkeypatch.setenv("MHEADS_DATA", str(tmp_path / "cache"))
    zebras = [("zebra", (10, 5, 40, 40))] * 25
    annotate(broken, "000001", [*zebras, *[("red", ("x", 1, 20, 20))] * 12, ("blue", (1, 1, 20, 20))], 48, 60)
    _, said = complaints(broken)
    assert "000001.xml, object 1, and 24 more: the class 'zebra' is not known" in said
    lines = Path(said.rpartition("all of them are in ")[2]).read_text().splitlines()
    assert "13 things" in said and len(lines) == 13 and "object 37: xmin of its box is 'x'" in lines[-1]


def test_images_of_training_without_proposals_are_measured_too(broken):
    _no_proposal(broken)
    data, _ = complaints(broken)
    whole = data.train.without_augmentation().read_targets(np.array([1]), None)
    width, height = data.train.scenes[1].truth.width, data.train.scenes[1].truth.height
    assert whole.targets[2].tolist() == [[0, 0, width - 1, height - 1]]


def test_images_of_a_line_or_a_point_can_be_read(broken):
    for name, size in (("000000", (3000, 1)), ("000001", (1, 1)), ("000002", (1, 3000))):
        Image.new("RGB", size, (200, 40, 40)).save(broken / f"JPEGImages/{name}.png")
        annotate(broken, name, [("red", (1, 1, *size))], *size)
    with pytest.warns(UserWarning, match="proposals lie outside"):
        experiment = build_experiment(configs.load("fast_rcnn", keys(broken)))
    _, sizes = experiment.data.train.read(np.arange(3), None)
    assert sizes.tolist() == [[1, 120], [96, 96], [120, 1]]
    batch = batch_of(experiment)
    report, _ = engine_gradients(experiment.net, experiment.loss, batch, micro_batches=4)
    assert np.isfinite(report.loss)


def test_what_overlaps_nothing_is_background_though_another_object_is_difficult():
    from mheads.data.detection.voc import Scene
    from mheads.problems.average_precision import Truth

    scene = Scene("s", None, Truth(np.array([[0.0, 0, 9, 9]]), np.array([1]), np.array([True]), 100, 50))
    proposed = np.array([[0, 0, 9, 8], [50, 20, 60, 30]])
    drawing = RegionOptions(background_overlap=(0, 0.5))
    assert label_regions(scene, proposed, drawing, with_truth=True)[1].tolist() == [-1, 0]


def test_an_image_to_test_without_proposals_is_tested_as_a_whole(broken):
    _no_proposal(broken)
    data, said = complaints(broken)
    assert "000005.png has no proposal: it is tested with the whole image as one" in said
    regions = data.test.read_targets(np.array([1]), None)
    height, width = data.problem.truths[-1].height, data.problem.truths[-1].width
    assert regions.targets[2].tolist() == [[0, 0, width - 1, height - 1]]


def test_mistakes_that_leave_nothing_to_do_stop(broken, tmp_path):
    def refused(words, **more):
        with pytest.raises(UserError, match=words):
            load_data(configs.load("fast_rcnn", keys(broken, **more)))

    refused("this one has none", **{"data.path": tmp_path / "nowhere"})
    refused(r"give selective_search, an \.npz file", **{"data.regions.proposals": "regions.txt"})
    refused("cannot be read", **{"data.regions.proposals": tmp_path / "none.npz"})
    refused("mean_image is for images of one size", **{"data.normalize": "mean_image"})
    refused(
        "data.normalize=init takes the normalisation of the source run, but init is random",
        **{"data.normalize": "init"},
    )
    refused(r"none\{x\}\.npz cannot be read", **{"data.regions.proposals": tmp_path / "none{x}.npz"})
    refused("cannot be read: .*No such file", **{"data.regions.proposals": tmp_path / "none.mat"})
    (tmp_path / "half.npz").write_bytes((broken / "proposals.npz").read_bytes()[:500])
    refused("cannot be read: File is not a zip file", **{"data.regions.proposals": tmp_path / "half.npz"})
    np.savez(tmp_path / "others.npz", **{"000000.png": np.zeros((3, 4))})
    refused(
        "no region of any image of trainval; the first is called 000000",
        **{"data.regions.proposals": tmp_path / "others.npz"},
    )
    refused("'red' is there twice", **{"data.regions.objects": "[red, red, blue]"})
    refused("'background' is there twice or is what", **{"data.regions.objects": "[red, background, blue]"})
    refused("there is none", **{"data.regions.objects": "[]"})
    refused("the lower one first", **{"data.regions.background_overlap": "[0.5, 0.1]"})
    refused("no object would be learned", **{"data.regions.per_image": 2})
    np.savez(tmp_path / "wrong.npz", **{"000000": np.zeros((3, 5))})
    refused(r"000000 is float64 \[3, 5\]; give finite numbers", **{"data.regions.proposals": tmp_path / "wrong.npz"})
    (broken / "ImageSets/Main/trainval.txt").unlink()
    refused(r"trainval\.txt cannot be read")


def test_commands_refuse_runs_that_do_not_detect(tmp_path, mheads):
    assert mheads("train", "digits", "optim.iterations=1", "data.limit=50", "-f", tmp_path / "digits").code == 0
    for command in (("eval", tmp_path / "digits"), ("show", tmp_path / "digits", "x.png")):
        done = mheads("detect", *command)
        assert done.code == 2 and "learned classification" in done.err


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("predict", "x.png", "--trust"), "mheads detect show draws"),
        (("export", "-o", "x.pt2", "--trust"), "a RegionPool takes side inputs"),
        (("saliency", "--trust"), "saliency is only for classification, but"),
    ],
)
def test_commands_for_whole_images_say_what_there_is_instead(run, mheads, tmp_path, monkeypatch, command, words):
    monkeypatch.chdir(tmp_path)
    done = mheads(command[0], run, *command[1:])
    assert done.code == 2 and words in done.err


def test_runs_that_were_measured_on_other_images_are_not_compared(scenes, run, tmp_path, mheads):
    other = tmp_path / "other"
    few = keys(scenes, **{"data.limit": 2, "optim.iterations": 1})
    assert mheads("detect", "train", *few, "-f", other).code == 0
    for command in ((run, other), (run, "--against", other)):
        done = mheads("detect", "eval", *command, "--trust")
        assert done.code == 2 and f"{run} was measured on 4 images of test and {other} on 2 images" in done.err
    paint(tmp_path / "VOC", seed=9)
    found = mheads("detect", "train", *keys(tmp_path / "VOC", **{"optim.iterations": 1}), "-f", tmp_path / "third")
    assert found.code == 0, found.err
    done = mheads("detect", "eval", run, "--against", tmp_path / "third", "--trust")
    assert done.code == 2 and "were each measured on 4 images of test, and these are not the same images" in done.err
    done = mheads("detect", "eval", run, run, "--trust")
    assert done.code == 2 and "is given twice: give each run once" in done.err


@pytest.mark.parametrize(
    ("output", "words"), [("found.docx", "ends in .png, .svg or .pdf"), (".", "ends in"), ("no/a.png", "no folder no")]
)
def test_pictures_that_cannot_be_drawn_are_refused_at_once(mheads, output, words):
    done = mheads("detect", "show", "nowhere", "image.jpg", "-o", output)
    assert done.code == 2 and words in done.err


def test_a_photo_that_is_to_be_turned_is_shown_as_it_is_stored_and_that_is_said(run, scenes, tmp_path, mheads):
    turned = Image.Exif()
    turned[0x0112] = 6
    with Image.open(scenes / "JPEGImages/000010.png") as image:
        image.convert("L").save(tmp_path / "000010.png", exif=turned)  # and grey ones can be shown
    done = mheads("detect", "show", run, tmp_path / "000010.png", "--trust")
    assert done.code == 0 and "000010.png is to be turned, its camera says" in " ".join((done.out + done.err).split())
    assert (tmp_path / "000010-objects.png").is_file()


def test_other_commands_know_detectors(run, scenes, mheads, tmp_path):
    done = mheads("eval", run, "--outputs", tmp_path / "o.npz", "--trust")
    assert done.code == 0 and "mAP of VOC 2007" in done.out
    with np.load(tmp_path / "o.npz") as found:
        assert found["outputs"].shape == (3, len(found["labels"]), 20)
        assert found["regions"].shape == (len(found["labels"]), 4) and len(set(found["images"])) == 4
    for what, file in (("report", "r.html"), ("video", "v.gif")):
        done = mheads(what, run, "-o", tmp_path / file)
        assert done.code == 0 and (tmp_path / file).stat().st_size > 1000, done.err
    page = (tmp_path / "r.html").read_text()
    assert "Average precision of each class" in page and "boxes as proposed" in page
    assert mheads("plot", "ownership", run, "-o", tmp_path / "p.png").code == 0
    loaded = load(run, trust=True)
    assert loaded.result.problem == "detection" and len(loaded.result.members) == 3


# Where regions come from.


def test_proposals_of_the_release_are_read(scenes, tmp_path):
    from scipy.io import savemat

    config = configs.load("fast_rcnn", keys(scenes))
    plain = load_data(config)
    for part, split in (("trainval", plain.train), ("test", plain.test)):
        cells, names = np.empty(len(split), object), np.empty(len(split), object)
        for i, (scene, boxes) in enumerate(zip(split.scenes, split.proposed, strict=True)):
            cells[i], names[i] = boxes[:, [1, 0, 3, 2]].astype(float) + 1, scene.name
        order = np.arange(len(split))[::-1]  # names say whose they are
        savemat(tmp_path / f"voc_2007_{part}.mat", {"boxes": cells[order][None], "images": names[order][:, None]})
    given = {"data.regions.proposals": tmp_path / "voc_2007_{part}.mat"}
    found = load_data(configs.load("fast_rcnn", keys(scenes, **given)))
    assert found.fingerprint == plain.fingerprint


def test_an_image_of_the_release_without_boxes_has_none(scenes, tmp_path):
    from scipy.io import savemat

    from mheads.data.detection.proposals import read_proposals

    cells, names = np.empty(2, object), np.empty(2, object)
    cells[:], names[:] = [np.ones((1, 4)), np.empty((0, 0))], ["000000", "000001"]
    savemat(tmp_path / "few.mat", {"boxes": cells, "images": names})
    train = load_data(configs.load("fast_rcnn", keys(scenes))).train
    assert [len(boxes) for boxes in read_proposals(tmp_path / "few.mat", train.scenes[:2])] == [1, 0]


def test_selective_search_looks_at_the_pixels_as_they_are_stored(tmp_path, monkeypatch):
    """A photo that its camera says to turn: its regions lie where its objects do, in the photo as it is."""
    cv2 = pytest.importorskip("cv2")
    if not hasattr(cv2, "ximgproc"):
        pytest.skip("OpenCV without its contributed modules")
    monkeypatch.setenv("MHEADS_DATA", str(tmp_path / "cache"))
    from mheads.data.detection.proposals import search
    from mheads.data.detection.voc import Scene

    pixels = np.full((60, 120, 3), 128, np.uint8)
    pixels[10:40, 80:110] = 200, 40, 40
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.fromarray(pixels).save(tmp_path / "photo.png", exif=turned)
    said = []
    photo = Scene("photo", tmp_path / "photo.png", None)
    (found,) = search([photo], said.append)
    assert box.overlaps(np.array([[80, 10, 109, 39]]), found).max() > 0.8 and not said
    # Copies are searched as one, and are answered in the same order whoever was searched first.
    (tmp_path / "copy.png").write_bytes((tmp_path / "photo.png").read_bytes())
    copy = Scene("copy", tmp_path / "copy.png", None)
    monkeypatch.setenv("MHEADS_DATA", str(tmp_path / "other"))
    assert all(np.array_equal(one, found) for one in search([copy, photo], said.append))
    Image.new("RGB", (3000, 1)).save(tmp_path / "line.png")
    assert len(search([Scene("line", tmp_path / "line.png", None)], said.append)[0]) == 0
    assert "line.png cannot be searched for regions" in said[0]


def test_selective_search_finds_objects_once_and_for_all(scenes, tmp_path, monkeypatch):
    cv2 = pytest.importorskip("cv2")
    if not hasattr(cv2, "ximgproc"):
        pytest.skip("OpenCV without its contributed modules")
    monkeypatch.setenv("MHEADS_DATA", str(tmp_path))
    config = configs.load("fast_rcnn", keys(scenes, **{"data.regions.proposals": "selective_search"}))
    found = load_data(config)
    best = [
        box.overlaps(truth.boxes, proposed).max(1).min()
        for truth, proposed in zip(found.problem.truths, [*found.train.proposed, *found.test.proposed], strict=True)
    ]
    assert np.mean(best) > 0.6  # every painted box is there, or nearly
    files = sorted(tmp_path.rglob("*.npy"))
    assert len(files) == 12
    times = [file.stat().st_mtime_ns for file in files]
    assert load_data(config).fingerprint == found.fingerprint
    assert [file.stat().st_mtime_ns for file in files] == times
    for file in files:
        file.unlink()
    assert load_data(config).fingerprint == found.fingerprint  # the same regions in the same order
