"""Tensors of every number of dimensions, layout and dtype."""

import torch


def tensors():
    """Every number of dimensions, every layout, every dtype."""
    torch.manual_seed(0)
    shapes = [(), (0,), (7,), (1, 3), (0, 3, 2), (2, 3, 4), (5, 3, 4, 2), (2, 3, 2, 4, 5), (2, 1, 3, 2, 1, 4)]
    image, video = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 4, 5, 6)
    return [
        *(torch.randn(shape) for shape in shapes),
        *(torch.randn(4, 3).to(dtype) for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.complex64)),
        *(torch.arange(6).to(dtype) for dtype in (torch.int64, torch.uint8, torch.bool)),
        image.to(memory_format=torch.channels_last),
        video.to(memory_format=torch.channels_last_3d),
        image.permute(3, 1, 0, 2),
        image[:, :, 1:3, ::2],
        image[1:],
        torch.randn(3, 1).expand(3, 4),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.randn(2, 8).as_strided((2, 1, 8, 1), (8, 1, 1, 1)),  # one channel: two ways of writing one layout
    ]


def is_dense(tensor):
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
