"""Capture: from a model factory to a graph that says exactly what eager PyTorch would compute.

    captured = capture(CaptureRequest("models.py:Net", inputs=(Input("x", "float32", (8, 4)),)))
    print(print_graph(captured.graph))
"""

from compiler.capture.capture import capture
from compiler.capture.request import BufferInfo, Captured, CaptureRequest, Input, ParameterInfo

__all__ = ["BufferInfo", "Captured", "CaptureRequest", "Input", "ParameterInfo", "capture"]
