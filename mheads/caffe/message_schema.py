"""The messages of Caffe's specifications, as protobuf's runtime wants them: a table instead of generated code.

Each line of `MESSAGES` is a message and its fields, `number name type`, `*type` for a repeated field, `=value` for a
default that is not zero. Numbers are Caffe's, since a .caffemodel is written by them; those above 9000 are our own, for
the fields of MPI-Caffe, which only occur in text. Of a .caffemodel only names and blobs are read.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from mheads.common.errors import UserError

ENUMS = """
Phase: TRAIN=0 TEST=1
DimCheckMode: STRICT=0 PERMISSIVE=1
VarianceNorm: FAN_IN=0 FAN_OUT=1 AVERAGE=2
NormalizationMode: FULL=0 VALID=1 BATCH_SIZE=2 NONE=3
DB: LEVELDB=0 LMDB=1
EltwiseOp: PROD=0 SUM=1 MAX=2
Norm: L1=1 L2=2
NormRegion: ACROSS_CHANNELS=0 WITHIN_CHANNEL=1
PoolMethod: MAX=0 AVE=1 STOCHASTIC=2
RoundMode: CEIL=0 FLOOR=1
ReductionOp: SUM=1 ASUM=2 SUMSQ=3 MEAN=4
Engine: DEFAULT=0 CAFFE=1 CUDNN=2
SnapshotFormat: HDF5=0 BINARYPROTO=1
SolverMode: CPU=0 GPU=1
SolverType: SGD=0 NESTEROV=1 ADAGRAD=2 RMSPROP=3 ADADELTA=4 ADAM=5
V1Type: NONE=0 ABSVAL=35 ACCURACY=1 ARGMAX=30 BNLL=2 CONCAT=3 CONTRASTIVE_LOSS=37 CONVOLUTION=4 DATA=5 DECONVOLUTION=39\
 DROPOUT=6 DUMMY_DATA=32 EUCLIDEAN_LOSS=7 ELTWISE=25 EXP=38 FLATTEN=8 HDF5_DATA=9 HDF5_OUTPUT=10 HINGE_LOSS=28\
 IM2COL=11 IMAGE_DATA=12 INFOGAIN_LOSS=13 INNER_PRODUCT=14 LRN=15 MEMORY_DATA=29 MULTINOMIAL_LOGISTIC_LOSS=16 MVN=34\
 POOLING=17 POWER=26 RELU=18 SIGMOID=19 SIGMOID_CROSS_ENTROPY_LOSS=27 SILENCE=36 SOFTMAX=20 SOFTMAX_LOSS=21 SPLIT=22\
 SLICE=33 TANH=23 WINDOW_DATA=24 THRESHOLD=31
"""

MESSAGES = """
BlobShape: 1 dim *int64
BlobProto: 7 shape BlobShape; 5 data *float; 6 diff *float; 8 double_data *double; 9 double_diff *double; 1 num int32;\
 2 channels int32; 3 height int32; 4 width int32
FillerParameter: 1 type string=constant; 2 value float; 3 min float; 4 max float=1; 5 mean float; 6 std float=1;\
 7 sparse int32=-1; 8 variance_norm VarianceNorm
NetParameter: 1 name string; 3 input *string; 8 input_shape *BlobShape; 4 input_dim *int32; 5 force_backward bool;\
 6 state NetState; 7 debug_info bool; 100 layer *LayerParameter; 2 layers *V1LayerParameter
NetState: 1 phase Phase=TEST; 2 level int32; 3 stage *string
NetStateRule: 1 phase Phase; 2 min_level int32; 3 max_level int32; 4 stage *string; 5 not_stage *string;\
 9001 mpi_rank *int32
ParamSpec: 1 name string; 2 share_mode DimCheckMode; 3 lr_mult float=1; 4 decay_mult float=1
SolverParameter: 24 net string; 25 net_param NetParameter; 1 train_net string; 2 test_net *string;\
 21 train_net_param NetParameter; 22 test_net_param *NetParameter; 26 train_state NetState; 27 test_state *NetState;\
 3 test_iter *int32; 4 test_interval int32; 19 test_compute_loss bool; 32 test_initialization bool=true;\
 5 base_lr float; 6 display int32; 33 average_loss int32=1; 7 max_iter int32; 36 iter_size int32=1;\
 8 lr_policy string; 9 gamma float; 10 power float; 11 momentum float; 12 weight_decay float;\
 29 regularization_type string=L2; 13 stepsize int32; 34 stepvalue *int32; 35 clip_gradients float=-1;\
 14 snapshot int32; 15 snapshot_prefix string; 16 snapshot_diff bool; 37 snapshot_format SnapshotFormat=BINARYPROTO;\
 17 solver_mode SolverMode=GPU; 18 device_id int32; 20 random_seed int64=-1; 40 type string=SGD; 31 delta float=1e-08;\
 39 momentum2 float=0.999; 38 rms_decay float=0.99; 23 debug_info bool; 28 snapshot_after_train bool=true;\
 30 solver_type SolverType; 41 layer_wise_reduce bool=true; 42 weights *string
"""

# Parameters of layers: the field of LayerParameter, its message, its number there and in the older V1LayerParameter
# (- if that has none), and the fields of the message.
PARAMETERS = """
transform_param TransformationParameter 100 36: 1 scale float=1; 2 mirror bool; 3 crop_size uint32;\
 4 mean_file string; 5 mean_value *float; 6 force_color bool; 7 force_gray bool
loss_param LossParameter 101 42: 1 ignore_label int32; 3 normalization NormalizationMode=VALID; 2 normalize bool
accuracy_param AccuracyParameter 102 27: 1 top_k uint32=1; 2 axis int32=1; 3 ignore_label int32
argmax_param ArgMaxParameter 103 23: 1 out_max_val bool; 2 top_k uint32=1; 3 axis int32
batch_norm_param BatchNormParameter 139 -: 1 use_global_stats bool; 2 moving_average_fraction float=0.999;\
 3 eps float=1e-05
bias_param BiasParameter 141 -: 1 axis int32=1; 2 num_axes int32=1; 3 filler FillerParameter
clip_param ClipParameter 148 -: 1 min float; 2 max float
concat_param ConcatParameter 104 9: 2 axis int32=1; 1 concat_dim uint32=1
contrastive_loss_param ContrastiveLossParameter 105 40: 1 margin float=1; 2 legacy_version bool
convolution_param ConvolutionParameter 106 10: 1 num_output uint32; 2 bias_term bool=true; 3 pad *uint32;\
 4 kernel_size *uint32; 6 stride *uint32; 18 dilation *uint32; 9 pad_h uint32; 10 pad_w uint32; 11 kernel_h uint32;\
 12 kernel_w uint32; 13 stride_h uint32; 14 stride_w uint32; 5 group uint32=1; 7 weight_filler FillerParameter;\
 8 bias_filler FillerParameter; 15 engine Engine; 16 axis int32=1; 17 force_nd_im2col bool
crop_param CropParameter 144 -: 1 axis int32=2; 2 offset *uint32
data_param DataParameter 107 11: 1 source string; 4 batch_size uint32; 7 rand_skip uint32; 8 backend DB;\
 2 scale float=1; 3 mean_file string; 5 crop_size uint32; 6 mirror bool; 9 force_encoded_color bool;\
 10 prefetch uint32=4
dropout_param DropoutParameter 108 12: 1 dropout_ratio float=0.5; 2 scale_train bool=true
dummy_data_param DummyDataParameter 109 26: 1 data_filler *FillerParameter; 6 shape *BlobShape; 2 num *uint32;\
 3 channels *uint32; 4 height *uint32; 5 width *uint32
eltwise_param EltwiseParameter 110 24: 1 operation EltwiseOp=SUM; 2 coeff *float; 3 stable_prod_grad bool=true
elu_param ELUParameter 140 -: 1 alpha float=1
embed_param EmbedParameter 137 -: 1 num_output uint32; 2 input_dim uint32; 3 bias_term bool=true;\
 4 weight_filler FillerParameter; 5 bias_filler FillerParameter
exp_param ExpParameter 111 41: 1 base float=-1; 2 scale float=1; 3 shift float
flatten_param FlattenParameter 135 -: 1 axis int32=1; 2 end_axis int32=-1
hdf5_data_param HDF5DataParameter 112 13: 1 source string; 2 batch_size uint32; 3 shuffle bool
hdf5_output_param HDF5OutputParameter 113 14: 1 file_name string
hinge_loss_param HingeLossParameter 114 29: 1 norm Norm=L1
image_data_param ImageDataParameter 115 15: 1 source string; 4 batch_size uint32=1; 7 rand_skip uint32;\
 8 shuffle bool; 9 new_height uint32; 10 new_width uint32; 11 is_color bool=true; 2 scale float=1; 3 mean_file string;\
 5 crop_size uint32; 6 mirror bool; 12 root_folder string
infogain_loss_param InfogainLossParameter 116 16: 1 source string; 2 axis int32=1
inner_product_param InnerProductParameter 117 17: 1 num_output uint32; 2 bias_term bool=true;\
 3 weight_filler FillerParameter; 4 bias_filler FillerParameter; 5 axis int32=1; 6 transpose bool
input_param InputParameter 143 -: 1 shape *BlobShape
log_param LogParameter 134 -: 1 base float=-1; 2 scale float=1; 3 shift float
lrn_param LRNParameter 118 18: 1 local_size uint32=5; 2 alpha float=1; 3 beta float=0.75; 4 norm_region NormRegion;\
 5 k float=1; 6 engine Engine
memory_data_param MemoryDataParameter 119 22: 1 batch_size uint32; 2 channels uint32; 3 height uint32; 4 width uint32
mpi_param MPIParameter 9001 9001: 1 root int32
mvn_param MVNParameter 120 34: 1 normalize_variance bool=true; 2 across_channels bool; 3 eps float=1e-09
parameter_param ParameterParameter 145 -: 1 shape BlobShape
pooling_param PoolingParameter 121 19: 1 pool PoolMethod; 4 pad uint32; 9 pad_h uint32; 10 pad_w uint32;\
 2 kernel_size uint32; 5 kernel_h uint32; 6 kernel_w uint32; 3 stride uint32=1; 7 stride_h uint32; 8 stride_w uint32;\
 11 engine Engine; 12 global_pooling bool; 13 round_mode RoundMode
power_param PowerParameter 122 21: 1 power float=1; 2 scale float=1; 3 shift float
prelu_param PReLUParameter 131 -: 1 filler FillerParameter; 2 channel_shared bool
python_param PythonParameter 130 -: 1 module string; 2 layer string; 3 param_str string; 4 share_in_parallel bool
recurrent_param RecurrentParameter 146 -: 1 num_output uint32; 2 weight_filler FillerParameter;\
 3 bias_filler FillerParameter; 4 debug_info bool; 5 expose_hidden bool
reduction_param ReductionParameter 136 -: 1 operation ReductionOp=SUM; 2 axis int32; 3 coeff float=1
relu_param ReLUParameter 123 30: 1 negative_slope float; 2 engine Engine
reshape_param ReshapeParameter 133 -: 1 shape BlobShape; 2 axis int32; 3 num_axes int32=-1
scale_param ScaleParameter 142 -: 1 axis int32=1; 2 num_axes int32=1; 3 filler FillerParameter; 4 bias_term bool;\
 5 bias_filler FillerParameter
sigmoid_param SigmoidParameter 124 38: 1 engine Engine
softmax_param SoftmaxParameter 125 39: 1 engine Engine; 2 axis int32=1
slice_param SliceParameter 126 31: 3 axis int32=1; 2 slice_point *uint32; 1 slice_dim uint32=1
spp_param SPPParameter 132 -: 1 pyramid_height uint32; 2 pool PoolMethod; 6 engine Engine
swish_param SwishParameter 147 -: 1 beta float=1
tanh_param TanHParameter 127 37: 1 engine Engine
threshold_param ThresholdParameter 128 25: 1 threshold float
tile_param TileParameter 138 -: 1 axis int32=1; 2 tiles int32
window_data_param WindowDataParameter 129 20: 1 source string; 2 scale float=1; 3 mean_file string;\
 4 batch_size uint32; 5 crop_size uint32; 6 mirror bool; 7 fg_threshold float=0.5; 8 bg_threshold float=0.5;\
 9 fg_fraction float=0.25; 10 context_pad uint32; 11 crop_mode string=warp; 12 cache_images bool;\
 13 root_folder string
"""

LAYER = """1 name string; 2 type string; 3 bottom *string; 4 top *string; 10 phase Phase; 5 loss_weight *float;\
 6 param *ParamSpec; 7 blobs *BlobProto; 11 propagate_down *bool; 8 include *NetStateRule; 9 exclude *NetStateRule"""
V1_LAYER = """4 name string; 5 type V1Type; 2 bottom *string; 3 top *string; 32 include *NetStateRule;\
 33 exclude *NetStateRule; 6 blobs *BlobProto; 1001 param *string; 1002 blob_share_mode *DimCheckMode;\
 7 blobs_lr *float; 8 weight_decay *float; 35 loss_weight *float"""


def _lines(table: str) -> list[tuple[str, str]]:
    return [(name, rest) for line in table.strip().splitlines() for name, _, rest in [line.partition(": ")]]


def parameter_fields(column: int) -> list[str]:
    """The parameters of layers as fields: column 2 of the table for LayerParameter, 3 for V1LayerParameter."""
    rows = [head.split() for head, _ in _lines(PARAMETERS)]
    return [f"{row[column]} {row[0]} {row[1]}" for row in rows if row[column] != "-"]


@cache
def pool() -> Any:
    """A pool of our own: other packages may have registered messages of the same names with theirs."""
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool
    except ImportError as error:
        raise UserError(
            "Caffe's files are read with protobuf, which is not installed: pip install 'mheads[caffe]'"
        ) from error
    file = descriptor_pb2.FileDescriptorProto(name="mheads/caffe.proto", package="caffe", syntax="proto2")
    enums = dict(_lines(ENUMS))
    for name, values in enums.items():
        # A value's name belongs to the scope around its enum: a message for each enum keeps them apart.
        scope = file.message_type.add(name=f"{name}s")
        enum = scope.enum_type.add(name=name)
        for pair in values.split():
            label, _, number = pair.partition("=")
            enum.value.add(name=label, number=int(number))
    parameters = [(head.split()[1], fields) for head, fields in _lines(PARAMETERS)]
    layers = [
        ("LayerParameter", "; ".join([LAYER, *parameter_fields(2)])),
        ("V1LayerParameter", "; ".join([V1_LAYER, *parameter_fields(3)])),
    ]
    kinds = descriptor_pb2.FieldDescriptorProto
    for name, fields in (*_lines(MESSAGES), *parameters, *layers):
        message = file.message_type.add(name=name)
        for text in fields.split("; "):
            number, label, kind = text.split(" ", 2)
            kind, _, default = kind.partition("=")
            repeated, kind = kind.startswith("*"), kind.removeprefix("*")
            field = message.field.add(name=label, number=int(number))
            field.label = kinds.LABEL_REPEATED if repeated else kinds.LABEL_OPTIONAL
            if kind in enums:
                field.type, field.type_name = kinds.TYPE_ENUM, f".caffe.{kind}s.{kind}"
            elif kind[0].isupper():
                field.type, field.type_name = kinds.TYPE_MESSAGE, f".caffe.{kind}"
            else:
                # What is written in text stays the number that was written; weights are Caffe's floats.
                kind = "double" if kind == "float" and name != "BlobProto" else kind
                field.type = getattr(kinds, f"TYPE_{kind.upper()}")
            if default:
                field.default_value = default
            if repeated and name in ("BlobShape", "BlobProto") and kind[0].islower():
                field.options.packed = True
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return pool


@cache
def message(name: str) -> Any:
    """The class of a message."""
    descriptor = pool().FindMessageTypeByName(f"caffe.{name}")
    from google.protobuf import message_factory

    return message_factory.GetMessageClass(descriptor)
