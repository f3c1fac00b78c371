"""The networks of `ocr` as ONNX graphs that take pixels and give no more than is read.

The package's graphs take normalised FP32 pixels and give, for text, the scores of 6625 characters at each of some
hundred places: what travels between the steps of the ensemble would be many times the image. So the arithmetic before
and after goes into the graphs.
"""

from collections.abc import Sequence
from pathlib import Path

import onnx
from onnx import TensorProto, helper

# Above this the classifier is believed that a line stands on its head, or that it does not (PaddleOCR's cls_thresh);
# where it is not so sure, the line follows most of its page.
SURE = 0.9
CLASSES = 2  # upright, on its head
LEAST_WIDTH = 320  # what the recogniser was trained on; shorter lines are read with the padding behind them
PIXELS_A_PLACE = 8  # the recogniser looks for a character every so often
SPECTRUM = (2, 1, 0)  # the networks were trained on OpenCV's order, blue first


def detector(source: Path) -> onnx.ModelProto:
    """PIXELS UINT8 [1, height, width, 3], sides that are multiples of 32 -> MAP FP32 [1, 1, height, width], 0 to 1."""
    model = onnx.load(source)
    nodes = [*_normalised("PIXELS", "pixels"), *_as_planes("pixels", model.graph.input[0].name, turned=(0, 3, 1, 2))]
    nodes_after = [_renamed(model.graph.output[0].name, "MAP")]
    output = helper.make_tensor_value_info("MAP", TensorProto.FLOAT, ["N", 1, "H", "W"])
    return _wrapped(model, [_pixels("PIXELS", ["N", "H", "W", 3])], nodes, nodes_after, [output])


def classifier(source: Path) -> onnx.ModelProto:
    """PIXELS UINT8 [lines, 48, 192, 3] -> ORIENTATIONS FP32 [lines, 2], probabilities of upright and upside down."""
    model = onnx.load(source)
    nodes = [*_normalised("PIXELS", "pixels"), *_as_planes("pixels", model.graph.input[0].name, turned=(0, 3, 1, 2))]
    nodes_after = [_renamed(model.graph.output[0].name, "ORIENTATIONS")]
    output = helper.make_tensor_value_info("ORIENTATIONS", TensorProto.FLOAT, ["N", CLASSES])
    return _wrapped(model, [_pixels("PIXELS", ["N", 48, 192, 3])], nodes, nodes_after, [output])


def recogniser(source: Path) -> onnx.ModelProto:
    """Lines of text as pixels -> the likeliest character at each place.

    PIXELS UINT8 [lines, 48, width, 3], WIDTHS INT64 [lines] (how much of the width is the line's own) and the
    classifier's ORIENTATIONS, which decide what is turned upright before it is read -> CHARACTERS INT64 and CONFIDENCES
    FP32, both [lines, places], and TURNED BOOL [lines]. Character 0 is "nothing here".

    The network runs line by line, in a loop, on as much as is the line's own: padding costs nothing, and a page no more
    memory than its longest line (all at once took 20 kB a column of pixels, 3 GB for a densely printed page).
    """
    model = onnx.load(source)
    reading = _reading_of_a_line(model.graph)
    node = helper.make_node
    constants = {"turned_class": [1], "two": [2], "pixels_a_place": [PIXELS_A_PLACE], "less_one": [7]}
    reals = {"half": [0.5], "sure_that_turned": [SURE], "sure_that_not_turned": [1 - SURE]}
    nodes = [
        node("Gather", ["ORIENTATIONS", "turned_class"], ["likely"], axis=1),
        node("ReduceMean", ["likely"], ["likely_page"], axes=[0, 1], keepdims=0),
        node("Greater", ["likely_page", "half"], ["page_is_turned"]),
        node("Where", ["page_is_turned", "sure_that_not_turned", "sure_that_turned"], ["least_likely"]),
        node("Greater", ["likely", "least_likely"], ["are_turned"]),
        node("Squeeze", ["are_turned"], ["TURNED"], axes=[1]),
        node("Shape", ["PIXELS"], ["shape"]),
        node("Gather", ["shape", "two"], ["width"]),
        node("Add", ["width", "less_one"], ["rounded"]),
        node("Div", ["rounded", "pixels_a_place"], ["places"]),
        node("Shape", ["WIDTHS"], ["lines"]),
        node("Loop", ["lines", ""], ["CHARACTERS", "CONFIDENCES"], body=reading),
    ]
    inputs = [
        _pixels("PIXELS", ["N", 48, "W", 3]),
        helper.make_tensor_value_info("WIDTHS", TensorProto.INT64, ["N"]),
        helper.make_tensor_value_info("ORIENTATIONS", TensorProto.FLOAT, ["N", CLASSES]),
    ]
    outputs = [
        helper.make_tensor_value_info("CHARACTERS", TensorProto.INT64, ["N", "T"]),
        helper.make_tensor_value_info("CONFIDENCES", TensorProto.FLOAT, ["N", "T"]),
        helper.make_tensor_value_info("TURNED", TensorProto.BOOL, ["N"]),
    ]
    initializers = [helper.make_tensor(name, TensorProto.INT64, [1], value) for name, value in constants.items()]
    initializers += [helper.make_tensor(name, TensorProto.FLOAT, [1], value) for name, value in reals.items()]
    model.graph.CopyFrom(helper.make_graph(nodes, "recogniser", inputs, outputs, initializers))
    onnx.checker.check_model(model)
    return model


def _reading_of_a_line(network: onnx.GraphProto) -> onnx.GraphProto:
    """The body of the loop over lines, around the network."""
    node = helper.make_node
    constants = {
        "zero": 0,
        "least_width": LEAST_WIDTH,
        "width_axis": 2,
        "first_row": -1,
        "last_row": -(2**31),
        "back": -1,
    }
    before = [
        node("Reshape", ["line_number", "one_value"], ["line"]),
        node("Gather", ["WIDTHS", "line"], ["own"], axis=0),
        node("Max", ["own", "least_width"], ["read"]),
        node("Gather", ["PIXELS", "line"], ["padded"], axis=0),
        node("Slice", ["padded", "zero", "read", "width_axis"], ["unpadded"]),
        *_normalised("unpadded", "pixels"),
        # Columns first, [1, width, 48, 3]: what is turned is a line's own width, and not the padding after it.
        node("Transpose", ["pixels"], ["columns"], perm=(0, 2, 1, 3)),
        node("ReverseSequence", ["columns", "own"], ["mirrored"], batch_axis=0, time_axis=1),
        node("Slice", ["mirrored", "first_row", "last_row", "width_axis", "back"], ["upside_down"]),
        node("Gather", ["TURNED", "line"], ["is_turned"], axis=0),
        node("Where", ["is_turned", "upside_down", "columns"], ["upright"]),
        *_as_planes("upright", network.input[0].name, turned=(0, 3, 2, 1)),
    ]
    scores = network.output[0].name
    after = [
        node("ArgMax", [scores], ["line_characters"], axis=2, keepdims=0),
        node("ReduceMax", [scores], ["line_confidences"], axes=[2], keepdims=0),
        # All lines have as many places as the widest would.
        node("Shape", ["line_characters"], ["line_shape"]),
        node("Gather", ["line_shape", "place_axis"], ["line_places"]),
        node("Sub", ["places", "line_places"], ["lacking"]),
        node("Concat", ["three_none", "lacking"], ["padding"], axis=0),
        node("Pad", ["line_characters", "padding", "no_character"], ["padded_characters"]),
        node("Pad", ["line_confidences", "padding", "no_confidence"], ["padded_confidences"]),
        node("Squeeze", ["padded_characters"], ["characters"], axes=[0]),
        node("Squeeze", ["padded_confidences"], ["confidences"], axes=[0]),
        node("Identity", ["go_on"], ["still_go_on"]),
    ]
    inputs = [
        helper.make_tensor_value_info("line_number", TensorProto.INT64, []),
        helper.make_tensor_value_info("go_on", TensorProto.BOOL, []),
    ]
    outputs = [
        helper.make_tensor_value_info("still_go_on", TensorProto.BOOL, []),
        helper.make_tensor_value_info("characters", TensorProto.INT64, ["T"]),
        helper.make_tensor_value_info("confidences", TensorProto.FLOAT, ["T"]),
    ]
    initializers = [
        *network.initializer,
        *_scale(),
        *(helper.make_tensor(name, TensorProto.INT64, [1], [value]) for name, value in constants.items()),
        helper.make_tensor("one_value", TensorProto.INT64, [1], [1]),
        helper.make_tensor("place_axis", TensorProto.INT64, [1], [1]),
        helper.make_tensor("three_none", TensorProto.INT64, [3], [0, 0, 0]),
        helper.make_tensor("no_character", TensorProto.INT64, [], [0]),
        helper.make_tensor("no_confidence", TensorProto.FLOAT, [], [0.0]),
    ]
    return helper.make_graph([*before, *network.node, *after], "line", inputs, outputs, initializers)


def characters(source: Path) -> list[str]:
    """What the recogniser can read, in the order of its classes from 1 on; the file carries them."""
    model = onnx.load(source)
    [entry] = [entry.value for entry in model.metadata_props if entry.key == "character"]
    found = [*entry.splitlines(), " "]  # the space is not in the list, but is the last class
    classes = model.graph.output[0].type.tensor_type.shape.dim[2].dim_value
    if len(found) != classes - 1:
        raise RuntimeError(f"{len(found)} characters for {classes} classes")
    return found


def _pixels(name: str, shape: Sequence[int | str]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.UINT8, shape)


def _normalised(name: str, result: str) -> list[onnx.NodeProto]:
    """0 to 255 as -1 to 1."""
    return [
        helper.make_node("Cast", [name], ["pixels_as_floats"], to=TensorProto.FLOAT),
        helper.make_node("Div", ["pixels_as_floats", "half_scale"], ["pixels_to_two"]),
        helper.make_node("Sub", ["pixels_to_two", "middle"], [result]),
    ]


def _as_planes(name: str, result: str, *, turned: tuple[int, ...]) -> list[onnx.NodeProto]:
    """The order of axes and of colours that the network wants."""
    return [
        helper.make_node("Transpose", [name], ["planes"], perm=turned),
        helper.make_node("Gather", ["planes", "spectrum"], [result], axis=1),
    ]


def _scale() -> list[onnx.TensorProto]:
    """What `_normalised` and `_as_planes` refer to."""
    return [
        helper.make_tensor("half_scale", TensorProto.FLOAT, [1], [127.5]),
        helper.make_tensor("middle", TensorProto.FLOAT, [1], [1.0]),
        helper.make_tensor("spectrum", TensorProto.INT64, [3], SPECTRUM),
    ]


def _renamed(name: str, result: str) -> onnx.NodeProto:
    return helper.make_node("Identity", [name], [result])


def _wrapped(
    model: onnx.ModelProto,
    inputs: Sequence[onnx.ValueInfoProto],
    before: Sequence[onnx.NodeProto],
    after: Sequence[onnx.NodeProto],
    outputs: Sequence[onnx.ValueInfoProto],
) -> onnx.ModelProto:
    """The model with nodes before and after its own, and other inputs and outputs."""
    graph = model.graph
    graph.initializer.extend(_scale())
    own = list(graph.node)
    for field, values in (("node", [*before, *own, *after]), ("input", inputs), ("output", outputs)):
        graph.ClearField(field)
        getattr(graph, field).extend(values)
    graph.ClearField("value_info")
    onnx.checker.check_model(model)
    return model
