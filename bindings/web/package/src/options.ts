/** Options as a page gives them: parsed strictly, so that a misspelling or an accident never runs as something else. */

import { RaptError } from "./errors.js";
import { said, type DType, type Tensor } from "./tensors.js";

/** The options of `attention`, named as in Python's `rapt.attention`. */
export interface Options {
  /** Boolean (`dtype: "bool"`, 1 attends) or additive, of any shape that broadcasts to `[batch, num_q_heads, q_len, kv_len]`. */
  mask?: Tensor | null;
  /** `true` and `"top_left"`: key `j` is seen by query `i` where `j ≤ i`; `"bottom_right"`: `j ≤ i + kv_len − q_len`. */
  causal?: boolean | "top_left" | "bottom_right" | null;
  /** Keys before and behind the diagonal, ends included; `null` is unbounded. */
  window?: readonly [number | null, number | null] | null;
  /** `c` of `c · tanh(score / c)`. */
  softcap?: number | null;
  /** The factor of `q · k`; `1 / sqrt(head_dim)` where it is not given. */
  scale?: number | null;
  /** One more logit per head, `[num_q_heads]`. */
  sinks?: Tensor | null;
  /** ALiBi slopes, `[num_q_heads]`. */
  alibi_slopes?: Tensor | null;
  /** `"bhsd"`: `[batch, heads, len, head_dim]`; `"bshd"`: `[batch, len, heads, head_dim]`. */
  layout?: "bhsd" | "bshd" | null;
  /** Where the result goes; its own memory where it is not given. */
  out?: Tensor | null;
  /** The dtype of the result; that of `q` where it is not given. */
  out_dtype?: Exclude<DType, "bool"> | null;
  /** Whether the log of the sum of exponentials is answered too. */
  return_lse?: boolean;
  /**
   * What computes. `"wasm"`: the CPU kernels of this package, to whose memory tensors are copied. `"webgpu"`: the page's GPU, to which they are
   * copied; a `GPUDevice`: that one, which reads tensors in its `GPUBuffer`s where they lie. `"wasm"` where it is not given.
   */
  device?: "wasm" | "webgpu" | GPUDevice | null;
  /** Whether the time on the GPU is answered too. */
  timing?: boolean;
}

const NAMES = ["mask", "causal", "window", "softcap", "scale", "sinks", "alibi_slopes", "layout", "out", "out_dtype", "return_lse", "device", "timing"];

/** The options as the module reads them. */
export interface GivenOptions {
  scale: number | null;
  softcap: number | null;
  causal: string | null;
  window: [number | null, number | null];
  layout: string;
  out_dtype: string | null;
  return_lse: boolean;
}

function refuse(option: string, got: unknown, allowed: string): never {
  throw new RaptError("OptionError", `${option} = ${said(got)}; allowed: ${allowed}`);
}

function real(option: "scale" | "softcap", got: unknown): number | null {
  if (got === undefined || got === null) return null;
  const allowed = option === "softcap" ? "null, or a finite number greater than 0" : "any finite number";
  return typeof got === "number" && Number.isFinite(got) ? got : refuse(option, got, allowed);
}

function causal(got: unknown): string | null {
  switch (got) {
    case undefined:
    case null:
    case false:
      return null;
    case true:
    case "top_left":
      return "top_left";
    case "bottom_right":
      return "bottom_right";
    default:
      return refuse("causal", got, 'null, false, true, "top_left" (what true means), "bottom_right"');
  }
}

function window(got: unknown): [number | null, number | null] {
  if (got === undefined || got === null) return [null, null];
  const allowed = "null, or [left, right] with each null (unbounded) or an integer from 0 up";
  const end = (end: unknown): number | null => {
    if (end === null) return null;
    if (!Number.isSafeInteger(end) || (end as number) < 0) return refuse("window", got, allowed);
    // Beyond this no tensor of a page reaches: such a window is unbounded.
    return (end as number) < 2 ** 31 ? (end as number) : null;
  };
  return Array.isArray(got) && got.length === 2 ? [end(got[0]), end(got[1])] : refuse("window", got, allowed);
}

function yes(option: string, got: unknown): boolean {
  if (got === undefined || got === null) return false;
  return typeof got === "boolean" ? got : refuse(option, got, "true, false");
}

/** The options, each of a type that it may have. */
export function parse(options: Options): GivenOptions {
  const unknown = Object.keys(options).find((name) => !NAMES.includes(name));
  if (unknown !== undefined) throw new RaptError("OptionError", `there is no option ${said(unknown)}; there are ${NAMES.join(", ")}`);
  const layout = options.layout ?? "bhsd";
  if (layout !== "bhsd" && layout !== "bshd") refuse("layout", layout, '"bhsd" ([batch, heads, len, head_dim]), "bshd" ([batch, len, heads, head_dim])');
  const dtype = options.out_dtype ?? null;
  if (dtype !== null && typeof dtype !== "string") refuse("out_dtype", dtype, 'null, "float64", "float32", "float16", "bfloat16"');
  yes("timing", options.timing);
  return {
    scale: real("scale", options.scale),
    softcap: real("softcap", options.softcap),
    causal: causal(options.causal),
    window: window(options.window),
    layout,
    out_dtype: dtype,
    return_lse: yes("return_lse", options.return_lse),
  };
}
