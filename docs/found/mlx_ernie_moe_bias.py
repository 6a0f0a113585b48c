"""mlx-lm: ERNIE 4.5 MoE chooses experts without the correction bias.

`Model.sanitize` drops `e_score_correction_bias`, and `Ernie4_5_MoeMLP` takes the top k of the scores alone.
transformers adds the bias before the choice. Control: a bias of zero agrees.
Published: baidu/ERNIE-4.5-21B-A3B-PT, ERNIE-4.5-300B-A47B-PT (`moe_use_aux_free` is true, biases are trained).
"""
# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch==2.13.0",
#     "transformers==5.24.0",
#     "mlx-lm==0.32.2",
#     "mlx[cpu]==0.32.4",
# ]
# ///

from tiny import error, mlx, report


def correction(size):
    def change(model):
        for name, bias in model.named_parameters():
            if name.endswith("e_score_correction_bias"):
                bias.normal_().mul_(size)

    return change


common = dict(
    head_dim=16,
    moe_num_experts=4,
    moe_k=2,
    moe_num_shared_experts=1,
    moe_intermediate_size=32,
    moe_layer_start_index=1,
    moe_layer_end_index=1,
    stored={"rope_theta": 500000.0},
)
wrong = error(mlx, "Ernie4_5_Moe", **common, before=correction(0.3))
control = error(mlx, "Ernie4_5_Moe", **common, before=correction(0.0))
report(wrong, control)
