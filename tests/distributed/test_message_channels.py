"""The courier: frames from several threads at once, to listeners that come early or late."""

import threading
import time
from collections import defaultdict

import torch
import torch.distributed as dist
from helpers.gloo_worlds import run_world

from mheads.distributed.message_channels import Courier

THREADS, FRAMES, CHANNELS = 6, 40, 3


def content(rank, thread, number):
    """Frames of very different sizes, which tell whose they are."""
    rows = 1 + 37 * (number % 11) * (1 if number % 3 else 40)
    return torch.arange(rows, dtype=torch.float32) + 1000 * thread + 100_000 * rank + number


def exchange(rank):
    """Every thread of every rank sends to all others; half of the channels are listened to only afterwards."""
    others = [r for r in range(3) if r != rank]
    expected = len(others) * THREADS * FRAMES
    found, failures = defaultdict(list), []
    everything = threading.Event()
    lock = threading.Lock()

    def listener(channel):
        def handle(key, value):
            sender, thread, number = key
            if not torch.equal(value["x"][0], content(sender, thread, number)):
                failures.append((channel, key))
            with lock:
                found[channel, sender, thread].append(number)
                if sum(map(len, found.values())) == expected:
                    everything.set()

        return handle

    def send(thread):
        for number in range(FRAMES):
            for other in others:
                value = {"x": (content(rank, thread, number),)}
                courier.send(other, [f"channel {number % CHANNELS}", rank, thread, number], value)

    courier = Courier(rank, others, lambda peer, error: failures.append((peer, str(error))))
    courier.listen("channel 0", listener("channel 0"))
    threads = [threading.Thread(target=send, args=(t,)) for t in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(1, CHANNELS):
        courier.listen(f"channel {number}", listener(f"channel {number}"))
    assert everything.wait(40)
    in_order = all(numbers == sorted(numbers) for numbers in found.values())
    courier.close()
    dist.barrier()
    return len(failures), in_order, courier.received


def test_frames_of_several_threads_arrive_whole_and_in_order_of_each_sender():
    """gloo's collectives, called from several threads, swap their payloads silently."""
    assert run_world(3, exchange) == [(0, True, 2 * THREADS * FRAMES)] * 3


def last_words(rank):
    """What a slow rank sends just before leaving arrives at one that leaves already, though nobody listens yet; its
    bytes only if they are wanted."""
    heard = []
    courier = Courier(rank, [1 - rank], lambda peer, error: heard.append(error))
    if rank == 0:
        time.sleep(0.2)  # so slow is it
        for courier.payload in (False, True):
            courier.send(1, ["end", courier.payload], torch.ones(1 << 20))
    courier.close()
    heard.append(courier.received)
    courier.listen("end", lambda key, value: heard.append((key, int(value.sum()), len(value))))
    dist.barrier()
    return heard


def test_nothing_that_was_sent_before_leaving_is_lost():
    """Defect 5 of MPI-Caffe: slow ranks lose their last output."""
    assert run_world(2, last_words) == [[0], [2, ([False], 0, 1 << 20), ([True], 1 << 20, 1 << 20)]]
