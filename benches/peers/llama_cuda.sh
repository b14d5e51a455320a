#!/bin/bash
# Builds llama.cpp and its files; cuda.py starts the three parts at once and says by variables where things are.
#   llama_cuda.sh tools   the quantiser first, then the benches, without CUDA (80 s on 16 cores)
#   llama_cuda.sh cuda    only the library of its CUDA backend, for one architecture (about 230 s on 16 cores)
#   llama_cuda.sh files   a checkpoint of the slice's widths, converted, quantised, and its blocks repeated to the slice's size
set -e
cd "$FOLDER"
export PATH=/usr/local/cuda/bin:$PATH
switches="-G Ninja -DCMAKE_BUILD_TYPE=Release -DGGML_BACKEND_DL=ON -DBUILD_SHARED_LIBS=ON -DGGML_NATIVE=OFF -DGGML_CCACHE=OFF
  -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_APP=OFF
  -DLLAMA_BUILD_NUMBER=11434"
case $1 in
tools)
  cmake -S "$SOURCE" -B tools $switches
  ninja -C tools -j "$CORES" llama-quantize
  touch quantise.done
  nice -n 5 ninja -C tools -j "$CORES" llama-bench llama-batched-bench ggml-cpu ;;
cuda)
  [ -n "$CUDA" ] || exit 0
  cmake -S "$SOURCE" -B cuda $switches -DGGML_CUDA=ON "-DCMAKE_CUDA_ARCHITECTURES=$CAPABILITY-real" -DGGML_CUDA_NCCL=OFF \
    -DGGML_CUDA_COMPRESSION_MODE=none -DGGML_CUDA_FA_QUANTS=f16-f16
  nice -n 5 ninja -C cuda -j "$CORES" ggml-cuda ;;
files)
  "$PYTHON" "$PEERS/make_bench_ckpt.py" checkpoint --preset "$PRESET" --vocab "$VOCABULARY"
  "$PYTHON" "$PEERS/to_gguf.py" "$SOURCE" checkpoint bf16.gguf bf16
  rm -rf checkpoint
  until [ -f quantise.done ]; do sleep 1; done
  LD_LIBRARY_PATH="$BIN:$LD_LIBRARY_PATH" "$BIN/llama-quantize" bf16.gguf small.gguf Q4_0 "$CORES"
  "$PYTHON" "$PEERS/expand_gguf.py" "$SOURCE/gguf-py" small.gguf q4.gguf --layers "$LAYERS" --experts "$EXPERTS"
  rm -f bf16.gguf small.gguf ;;
esac
