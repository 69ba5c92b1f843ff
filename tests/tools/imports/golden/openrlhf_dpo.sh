set -x
read -r -d '' training_commands <<EOF
openrlhf.cli.train_dpo \
   --ckpt.output_dir ./checkpoint/dpo \
   --train.batch_size 64 \
   --train.micro_batch_size 2 \
   --model.model_name_or_path Qwen/Qwen3-0.6B \
   --train.max_epochs 2 \
   --data.max_len 2048 \
   --adam.lr 5e-7 \
   --model.beta 0.1 \
   --model.ipo_enable \
   --data.dataset pairs.jsonl \
   --data.chosen_key chosen --data.rejected_key worse \
   --ref.offload \
   --ds.packing_samples
EOF

if [[ ${1} != "slurm" ]]; then
    deepspeed --num_gpus ${NPROC:-4} --module $training_commands
fi
