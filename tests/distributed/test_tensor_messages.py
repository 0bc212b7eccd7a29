"""Frames between real processes, and what gloo would do to them."""

import weakref
from collections import namedtuple

import pytest
import torch
import torch.distributed as dist
from helpers.gloo_worlds import run_world
from helpers.tensors_of_every_kind import is_dense, tensors

from mheads.distributed import tensor_messages
from mheads.distributed.tensor_messages import HEADER, Frame, Outbox, PeerError, post, take

Boxes = namedtuple("Boxes", "scores deltas")


def frames():
    torch.manual_seed(1)
    a, b = torch.randn(2, 3), torch.arange(4)
    return [
        Frame(["step", 3, True], None),
        Frame(None, (a,)),
        Frame("x" * 9000, [a, b]),  # a key that is longer than a header
        Frame(1.5, {"a": a, "b": [b, (a, None)]}),
        Frame("boxes", Boxes(a, [b, b])),
        Frame("many", [torch.randn(i % 5, 2) for i in range(200)]),
        Frame("none", ()),
        *(about_a_header(more) for more in range(-2, 3)),
        Frame(["y" * 9000], {"a": a, "b": [b, b]}),
    ]


def about_a_header(more):
    """A frame of as many bytes as a header has, and `more`."""
    description = '["k", {"t": "uint8", "s": [0000], "r": [1]}]'
    size = HEADER + more - 4 - len(description)
    assert len(str(size)) == 4
    return Frame("k", torch.arange(size).to(torch.uint8))


def send_everything(rank):
    """Rank 0 has posted all before rank 1 takes the first."""
    sent = [*(Frame("tensor", tensor) for tensor in tensors()), *frames()]
    if rank == 0:
        posted = [post(frame, 1, tag=5) for frame in sent]
        dist.barrier()
        for under_way in posted:
            under_way.wait()
        return None
    dist.barrier()
    return [take(0, tag=5) for _ in sent]


def same(got, sent):
    """Of the same form, and every tensor of the same dtype, values and, if it fills its memory, strides."""
    if isinstance(sent, torch.Tensor):
        layout = got.stride() == sent.stride() or not is_dense(sent)
        return got.dtype == sent.dtype and torch.equal(got, sent) and layout
    if type(got) is not type(sent) or sent is None:
        return got is sent
    if isinstance(sent, dict):
        return list(got) == list(sent) and all(same(got[key], sent[key]) for key in sent)
    return len(got) == len(sent) and all(map(same, got, sent))


def test_values_arrive_in_form_bits_and_layout_however_early_they_were_sent():
    """Defect 4: any number of dimensions, any number of rows."""
    got = run_world(2, send_everything)[1]
    for frame, tensor in zip(got, tensors(), strict=False):
        assert same(frame.value, tensor), (tensor.dtype, tensor.shape, tensor.stride(), frame.value.stride())
    for frame, sent in zip(got[len(tensors()) :], frames(), strict=True):
        assert frame.key == sent.key
        assert same(frame.value, sent.value), sent.key


def scramble(rank):
    """A channels-last tensor through torch.distributed itself, and through a frame."""
    x = torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last)
    if rank == 0:
        with pytest.raises((RuntimeError, ValueError)):
            dist.send(x, 1, tag=9)
        dist.broadcast(x, 0)
        post(Frame(None, x), 1).wait()
        return x, x
    buffer = torch.zeros(1, 2, 3, 4)
    dist.broadcast(buffer, 0)
    return buffer, take(0).value


def test_a_channels_last_tensor_is_neither_refused_nor_scrambled():
    """If torch no longer refuses (`send`) or scrambles (`broadcast`) it, mend the docstring of tensor_messages.py."""
    (x, _), (theirs, ours) = run_world(2, scramble)
    assert not torch.equal(theirs, x)
    assert torch.equal(ours, x)
    assert ours.is_contiguous(memory_format=torch.channels_last)


def without_payload(rank):
    value = {"image": torch.ones(3, 5, 8, 9).to(memory_format=torch.channels_last), "rows": torch.ones(7).long()}
    if rank == 0:
        under_way = [post(Frame("full", value), 1), post(Frame("bare", value), 1, payload=False)]
        for posted in under_way:
            posted.wait()
        return [posted.num_bytes for posted in under_way]
    return [take(0), take(0)]


def test_a_payload_that_is_left_out_is_not_sent_and_arrives_as_zeros():
    sizes, (full, bare) = run_world(2, without_payload)
    assert sizes == [HEADER + 4 * 3 * 5 * 8 * 9 + 8 * 7, HEADER]
    assert (full.key, bare.key) == ("full", "bare")
    for name, tensor in full.value.items():
        zeros = bare.value[name]
        assert (zeros.shape, zeros.stride(), zeros.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
        assert tensor.all() and not zeros.any()


def keep(rank):
    """An outbox towards a slow rank: what it lets go of, and when."""
    if rank == 1:
        dist.barrier()  # two frames have been sent, nothing has been asked for
        taken = [take(0, tag=1).key for _ in range(2)]
        dist.barrier()
        return taken
    outbox = Outbox()
    posted = [post(Frame(key, torch.zeros(3)), 1, tag=1) for key in ("first", "second")]
    bytes_of = [weakref.ref(frame) for frame in posted]
    for _ in range(2):
        outbox.put(posted.pop(0))
    kept = [ref() is not None for ref in bytes_of]
    dist.barrier()
    outbox.settle()
    left = [ref() is not None for ref in bytes_of]  # of what is taken, nothing, though the outbox waits for more
    dist.barrier()
    outbox.close()
    return kept, left


def test_an_outbox_keeps_what_was_sent_until_it_is_taken_and_no_longer():
    (kept, left), taken = run_world(2, keep)
    assert kept == [True, True]
    assert left == [False, False]
    assert taken == ["first", "second"]


def fall_silent(rank):
    """Rank 1 ends at once; rank 2 stays and says nothing."""
    if rank == 1:
        return None
    if rank == 2:
        with pytest.raises(RuntimeError):  # until rank 0 gives up, which ends all connections
            dist.recv(torch.zeros(1), 0)
        return None
    with pytest.raises(PeerError) as gone:
        take(1)
    outbox = Outbox()
    with pytest.raises(PeerError, match="rank 1 has ended"):
        outbox.put(post(Frame(None, torch.zeros(1)), 1))
        outbox.settle()
    with pytest.raises(PeerError) as late:
        take(2, timeout=0.5)
    return str(gone.value), str(late.value), late.value.rank


def test_a_silent_rank_is_named():
    gone, late, rank = run_world(3, fall_silent)[0]
    assert gone == "rank 1 has ended, or its connection is lost"
    assert late == "rank 2 did not answer within 0.5 s"
    assert rank == 2


def test_what_is_no_value_is_refused():
    with pytest.raises(TypeError, match="not int"):
        tensor_messages._describe([torch.zeros(1), 3], [])
    with pytest.raises(TypeError, match="not str"):
        tensor_messages._describe({"a": "text"}, [])


def test_a_frame_cannot_call_what_it_likes():
    with pytest.raises(TypeError, match="os:getcwd is not a named tuple"):
        tensor_messages._build({"n": "os:getcwd", "v": []}, [])
