"""Average precision: cases worked by hand, and a plain implementation of the development kit's rules beside ours."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mheads.problems import boxes
from mheads.problems.average_precision import IGNORED, WRONG, Truth, average_precisions, matches


def by_the_kit(found, truths, class_number):
    """As VOCevaldet.m goes through detections (image, box, score), one by one, and as its later editions do."""
    wanted = [
        [(b, d) for b, c, d in zip(t.boxes, t.classes, t.difficult, strict=True) if c == class_number] for t in truths
    ]
    count = sum(not difficult for objects in wanted for _, difficult in objects)
    if not count:
        return None
    taken = [[False] * len(objects) for objects in wanted]
    hits, misses = [], []
    for image, box, _ in sorted(found, key=lambda one: -one[2]):
        best, which = -np.inf, None
        for j, (other, _) in enumerate(wanted[image]):
            left, top = max(box[0], other[0]), max(box[1], other[1])
            right, bottom = min(box[2], other[2]), min(box[3], other[3])
            width, height = right - left + 1, bottom - top + 1
            if width > 0 and height > 0:
                areas = [(b[2] - b[0] + 1) * (b[3] - b[1] + 1) for b in (box, other)]
                overlap = width * height / (sum(areas) - width * height)
                if overlap > best:
                    best, which = overlap, j
        if best >= 0.5:
            if wanted[image][which][1]:
                continue
            hits.append(0.0 if taken[image][which] else 1.0)
            misses.append(1.0 - hits[-1])
            taken[image][which] = True
        else:
            hits.append(0.0)
            misses.append(1.0)
    hits, misses = np.cumsum(hits), np.cumsum(misses)
    recall, precision = hits / count, hits / (hits + misses) if len(hits) else hits
    eleven = 0.0
    for t in np.arange(0, 1.1, 0.1):
        above = precision[recall >= t]
        eleven += (above.max() if len(above) else 0.0) / 11
    r, p = np.concatenate([[0], recall, [1]]), np.concatenate([[0], precision, [0]])
    for i in range(len(p) - 2, -1, -1):
        p[i] = max(p[i], p[i + 1])
    area = sum((r[i + 1] - r[i]) * p[i + 1] for i in range(len(r) - 1))
    return {"11-point": 100 * eleven, "all-point": 100 * area}


def ours(found, truths, class_number):
    hits = [matches(np.array([box], float), class_number, truths[image])[0] for image, box, _ in found]
    first = np.cumsum([0, *(len(t.boxes) for t in truths)])
    hits = [hit + first[image] if hit >= 0 else hit for hit, (image, _, _) in zip(hits, found, strict=True)]
    count = sum(int(((t.classes == class_number) & ~t.difficult).sum()) for t in truths)
    scores = np.array([score for _, _, score in found], float)
    return average_precisions(scores, np.array(hits, np.int64), count)


def truth(*objects):
    """Objects as (box, class, difficult)."""
    return Truth(
        np.array([b for b, _, _ in objects], float).reshape(-1, 4),
        np.array([c for _, c, _ in objects], np.int64),
        np.array([d for _, _, d in objects], bool),
        100,
        100,
    )


A, B, FAR = (10, 10, 29, 29), (50, 50, 79, 79), (90, 0, 99, 9)


@pytest.mark.parametrize(
    ("found", "eleven", "every"),
    [
        ([], 0, 0),
        ([(0, A, 0.9), (0, B, 0.8)], 100, 100),
        ([(0, FAR, 0.9), (0, A, 0.8)], 100 * 6 * 0.5 / 11, 25),  # half of the objects, at precision 1/2
        ([(0, A, 0.9), (0, A, 0.8), (0, B, 0.7)], 100 * (6 + 5 * 2 / 3) / 11, 100 * (0.5 + 0.5 * 2 / 3)),  # found twice
        ([(0, A, 0.5), (0, FAR, 0.5), (0, B, 0.5)], 100 * (6 + 5 * 2 / 3) / 11, 100 * (0.5 + 0.5 * 2 / 3)),  # in order
        ([(0, A, 0.9), (1, A, 0.8), (0, B, 0.7)], 100 * (6 + 5 * 2 / 3) / 11, 100 * (0.5 + 0.5 * 2 / 3)),  # elsewhere
    ],
    ids=["nothing", "all", "wrong first", "twice", "ties", "other image"],
)
def test_cases_worked_by_hand(found, eleven, every):
    truths = [truth((A, 1, False), (B, 1, False), (FAR, 2, False)), truth((A, 1, True))]
    truths[1] = truth((B, 2, False)) if any(image == 1 for image, _, _ in found) else truths[1]
    result = ours(found, truths, 1)
    assert result["11-point"] == pytest.approx(eleven)
    assert result["all-point"] == pytest.approx(every)


def test_difficult_objects_neither_help_nor_harm_and_a_class_without_objects_has_none():
    truths = [truth((A, 1, False), (B, 1, True))]
    assert ours([(0, B, 0.9), (0, B, 0.85), (0, A, 0.8)], truths, 1) == {"11-point": 100, "all-point": 100}
    assert all(np.isnan(value) for value in ours([(0, A, 0.9)], truths, 7).values())
    assert all(np.isnan(value) for value in ours([(0, A, 0.9)], [truth((A, 1, True))], 1).values())
    assert matches(np.array([A, B, FAR], float), 1, truths[0]).tolist() == [0, IGNORED, WRONG]


def test_an_overlap_of_exactly_half_counts():
    half = truth(((0, 0, 9, 9), 1, False))
    assert matches(np.array([[0, 0, 9, 4], [0, 0, 9, 3]], float), 1, half).tolist() == [0, WRONG]


corner = st.integers(0, 12)
box_of = st.tuples(corner, corner, corner, corner).map(
    lambda c: (min(c[0], c[2]), min(c[1], c[3]), max(c[0], c[2]), max(c[1], c[3]))
)
images = st.lists(
    st.lists(st.tuples(box_of, st.integers(1, 3), st.booleans()), max_size=5).map(lambda o: truth(*o)),
    min_size=1,
    max_size=4,
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(images, st.lists(st.tuples(st.integers(0, 3), box_of, st.integers(0, 6)), max_size=40))
def test_random_detections_agree_with_the_kit(truths, found):
    found = [(image % len(truths), box, score / 6) for image, box, score in found]  # many equal scores
    for class_number in (1, 2, 3):
        expected, got = by_the_kit(found, truths, class_number), ours(found, truths, class_number)
        if expected is None:
            assert all(np.isnan(value) for value in got.values())
        else:
            assert got == pytest.approx(expected, abs=1e-9)


# Boxes.


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(box_of, box_of), min_size=1, max_size=8))
def test_decoding_undoes_encoding_and_mirroring_itself(pairs):
    a, b = (np.array(side, float) for side in zip(*pairs, strict=True))
    deltas = boxes.encode(a, b)
    np.testing.assert_allclose(boxes.decode(a, deltas), b, atol=1e-9)
    np.testing.assert_array_equal(boxes.mirror(boxes.mirror(a, 20), 20), a)
    turned = boxes.encode(boxes.mirror(a, 20), boxes.mirror(b, 20))
    np.testing.assert_allclose(turned, deltas * [-1, 1, 1, 1], atol=1e-12)


def test_targets_of_boxes_are_those_of_fast_rcnn():
    (found,) = boxes.encode(np.array([[10.0, 20, 29, 59]]), np.array([[14.0, 10, 53, 29]]))
    # 20 x 40 about (20, 40), and 40 x 20 about (34, 20).
    np.testing.assert_allclose(found, [14 / 20, -20 / 40, np.log(2), np.log(0.5)])


def test_a_wild_answer_stays_finite():
    wild = boxes.decode(np.array([[0.0, 0, 9, 9]]), np.array([[0.0, 0, 1e6, 1e6]]))
    assert np.isfinite(wild).all()


def greedy(found, scores, threshold):
    """The best box, then the best of those that do not overlap one that was kept."""
    kept = []
    for i in sorted(range(len(found)), key=lambda i: -scores[i]):
        if all(boxes.overlaps(found[i, None], found[j, None])[0, 0] <= threshold for j in kept):
            kept.append(i)
    return kept


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.lists(box_of, min_size=6, max_size=6), min_size=1, max_size=3), st.sampled_from([0.3, 0.5]))
def test_suppression_is_the_greedy_one_for_all_sets_at_once(sets, threshold):
    found = np.array(sets, float)
    there = np.ones(found.shape[:2], bool)
    there[:, -1] = False
    stays = boxes.suppress(found, there, threshold)
    for one, mask in zip(found, stays, strict=True):
        assert np.flatnonzero(mask).tolist() == sorted(greedy(one[:-1], -np.arange(5), threshold))
