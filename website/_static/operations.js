/** Plain names of torch's operations, for readers who do not know aten. */

const NAMES = {
  _log_softmax: "log-softmax of the loss",
  _log_softmax_backward_data: "gradient of the loss's log-softmax",
  _safe_softmax: "softmax",
  _scaled_dot_product_cudnn_attention: "attention (cuDNN)",
  _scaled_dot_product_efficient_attention: "attention (memory-efficient)",
  _scaled_dot_product_flash_attention: "attention (flash)",
  _softmax: "softmax",
  _softmax_backward_data: "gradient of softmax",
  _to_copy: "conversion to another type",
  _foreach_norm: "norms of the gradients",
  add: "addition",
  addmm: "matrix product with a bias",
  arange: "positions",
  baddbmm: "batch of matrix products with a bias",
  bmm: "batch of matrix products",
  cat: "concatenation",
  clamp: "clipping to a range",
  clone: "copy",
  constant_pad_nd: "padding",
  cos: "cosine",
  cumsum: "running sum",
  dequantize_4bit: "weights read back from 4 bits",
  dequantize_blockwise: "optimizer states read back from 8 bits",
  div: "division",
  embedding: "embedding",
  embedding_dense_backward: "gradient of the embedding",
  gather: "values picked by index",
  gemm_4bit: "matrix product with 4-bit weights",
  index: "values picked by index",
  linalg_vector_norm: "norm of the gradients",
  masked_fill: "masking",
  mean: "mean",
  mm: "matrix product",
  mul: "multiplication",
  native_dropout: "dropout",
  native_layer_norm: "layer norm",
  neg: "negation",
  nll_loss_backward: "gradient of the loss",
  nll_loss_forward: "loss",
  pow: "power",
  quantize_4bit: "weights written in 4 bits",
  quantize_blockwise: "optimizer states written in 8 bits",
  reciprocal: "reciprocal",
  relu: "ReLU",
  rsqrt: "inverse square root",
  rsub: "subtraction",
  silu: "SiLU",
  gelu: "GELU",
  sin: "sine",
  stack: "stacking",
  sub: "subtraction",
  sum: "sum",
  threshold_backward: "gradient of ReLU",
  tril: "causal mask",
  where: "choice by a mask",
  zeros: "zeros",
  zeros_like: "zeros",
};

/**
 * Return the plain name of an operation: "matrix product" for "aten.mm.default".
 * @param {string} operation as torch calls it; any other text is returned unchanged
 */
export function operationText(operation) {
  const [, name] = /^(?:aten|bitsandbytes)\.(\w+)(?:\.\w+)?$/.exec(operation) ?? [];
  if (name === undefined) return operation;
  const forward = name.replace(/_backward$/, "");
  if (name in NAMES) return NAMES[name];
  const text = NAMES[forward] ?? forward.replaceAll("_", " ").replace(/^(native|new|foreach) /, "").trim();
  return forward === name ? text : `gradient of ${text}`;
}
