"""Names that TRL, verl and others have for fields of klamp, for the error that names klamp's.

What klamp takes without a word is a field's own name and its aliases (`klamp.config.ALIASES`). The error says what
klamp's field is in the words that stand under it, or how it differs where the other name counts something else.
"""

from __future__ import annotations

from collections.abc import Mapping

OTHERS: Mapping[str, str] = {
    "learning_rate": "lr actor_lr peak_lr",
    "max_steps": "steps num_steps train_steps total_steps total_training_steps "
    "epochs num_epochs num_train_epochs total_epochs",
    "prompts_per_step": "batch_size train_batch_size global_batch_size rollout_batch_size "
    "per_device_train_batch_size generation_batch_size",
    "gradient_accumulation_steps": "micro_batch_size ppo_micro_batch_size_per_gpu grad_accum num_minibatches",
    "num_generations": "n group_size num_samples n_samples samples_per_prompt n_samples_per_prompt rollout_n",
    "max_completion_length": "max_new_tokens max_tokens max_length response_length max_response_length",
    "num_iterations": "mu ppo_epochs num_ppo_epochs update_epochs",
    "beta": "kl kl_coeff kl_weight kl_lambda init_kl_coef kl_loss_coef",
    "target_kl": "kl_target desired_kl",
    "kl_controller": "kl_ctrl kl_ctrl_type adap_kl_ctrl adaptive_kl",
    "kl_estimator": "kl_loss_type kl_type kl_penalty_type",
    "epsilon": "clip_range cliprange clip_ratio clip_eps eps_clip clip_param",
    "epsilon_high": "clip_ratio_high eps_clip_high",
    "scale_rewards": "norm_adv_by_std_in_grpo normalize_advantages std_normalization",
    "loss_type": "loss_agg_mode loss",
    "model": "model_name_or_path model_name model_path base_model pretrain",
    "ref_model": "ref_model_path reference_model ref_model_name_or_path",
    "lora_r": "lora_rank lora",
    "dtype": "bf16 fp16 torch_dtype precision mixed_precision",
    "task": "dataset dataset_name data train_file train_files",
    "reward": "reward_funcs reward_fn reward_function",
    "max_grad_norm": "grad_clip clip_grad max_norm",
    "warmup_steps": "warmup warmup_ratio lr_warmup_steps",
    "lr_scheduler_type": "lr_scheduler lr_schedule scheduler",
    "save_every": "save_steps save_freq save_interval",
    "eval_every": "eval_steps test_freq eval_freq eval_interval",
    "keep_checkpoints": "save_total_limit",
    "report_to": "wandb tensorboard logger log_with tracker",
    "output_dir": "output out out_dir save_dir",
    "resume": "resume_from_checkpoint",
    "cpu": "use_cpu no_cuda",
}
"""klamp's field -> what others call it, or what comes nearest to it."""

OTHER_NAMES: Mapping[str, str] = {name: field for field, names in OTHERS.items() for name in names.split()}
"""Another trainer's name -> klamp's field."""

EPOCHS = "klamp counts steps, not passes over the data: one pass is (prompts of the task) / prompts_per_step steps"
BATCH = "prompts_per_step counts the prompts of a step over all processes, with num_generations completions of each"
PARTS = "it is the number of parts that a process's share of a step is computed in, not the size of one"

DIFFERENCES: Mapping[str, str] = {
    **dict.fromkeys(("epochs", "num_epochs", "num_train_epochs", "total_epochs"), EPOCHS),
    **dict.fromkeys(OTHERS["prompts_per_step"].split(), BATCH),
    **dict.fromkeys(OTHERS["gradient_accumulation_steps"].split(), PARTS),
    "kl_loss_coef": "verl's coefficient weighs the KL as its loss_agg_mode averages it, klamp's as kl_normalizer does",
    "kl_loss_type": "kl_estimator names the value: verl's kl is k1, mse is k2, low_var_kl is k3",
    "warmup_ratio": "warmup_steps counts steps; it is no share of the run",
}
"""Another trainer's name -> how klamp's field differs, where it counts or weighs something else."""
