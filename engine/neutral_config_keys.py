"""Keys of config.json that do not change what a decoder computes at inference.

They concern training, generation defaults, other tasks, the file's history, or other programs.
Any other key must be understood by `Architecture.from_config`.
"""

_HISTORY = """
    _name_or_path name_or_path transformers_version _commit_hash transformers.js_config
    is_llama_config unsloth_fixed unsloth_version _from_model_config model_name
"""
_TRAINING = """
    initializer_range attention_dropout hidden_dropout embd_pdrop resid_pdrop attn_pdrop dropout
    use_cache pretraining_tp gradient_checkpointing neftune_noise_alpha
    router_jitter_noise router_aux_loss_coef output_router_logits
"""
_IMPLEMENTATION = """
    attn_implementation _attn_implementation _attn_implementation_autoset
    _attn_implementation_internal _experts_implementation _experts_implementation_internal
    experts_implementation _flash_attn_2_enabled return_dict output_hidden_states
    output_attentions use_return_dict torchscript use_bfloat16 chunk_size_feed_forward
"""
_TOKENS = """
    pad_token_id sep_token_id cls_token_id unk_token_id mask_token_id tokenizer_class prefix
    model_max_length max_sequence_length decoder_start_token_id
"""
_OTHER_TASKS = """
    id2label label2id num_labels problem_type finetuning_task task_specific_params
"""
_GENERATION = """
    max_length min_length max_new_tokens do_sample early_stopping num_beams num_beam_groups
    diversity_penalty temperature top_k top_p min_p typical_p repetition_penalty length_penalty
    no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences
    output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id
    remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
"""

NEUTRAL_CONFIG_KEYS = frozenset(
    (_HISTORY + _TRAINING + _IMPLEMENTATION + _TOKENS + _OTHER_TASKS + _GENERATION).split()
)
