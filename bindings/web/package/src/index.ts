/**
 * Attention with an exact tensor boundary, in browsers and in Node.
 *
 * `attention(q, k, v, options)` computes `softmax(q · kᵀ · scale + mask) · v` of tensors as they lie, on the page's GPU or on the CPU kernels in
 * WebAssembly. What is not served exactly is a `RaptError` before anything is written.
 */

import { RaptError } from "./errors.js";
import { Gpu, ofPage, type Timing } from "./gpu.js";
import { parse, type Options } from "./options.js";
import { Buffers, SIZES, arrayOn, isGpuBuffer, said, scatter, type Given, type HostArray, type Tensor } from "./tensors.js";
import { current, load as loadModule, type Answer, type Block, type Module, type Output } from "./wasm.js";

export { RaptError, type ErrorCode } from "./errors.js";
export { adapter, requiredLimits, type AdapterReport, type Timing } from "./gpu.js";
export type { Options } from "./options.js";
export type { DType, HostArray, Tensor } from "./tensors.js";

/** A tensor of a result. */
export interface Result<Data extends HostArray | GPUBuffer = HostArray> extends Tensor {
  data: Data;
  strides: number[];
  shape: number[];
}

/** What attention answers. */
export interface Attended<Data extends HostArray | GPUBuffer = HostArray> {
  out: Result<Data>;
  /** With `return_lse`: the log of the sum of exponentials, `[batch, num_q_heads, q_len]`. */
  lse?: Result<Data>;
  /** With `timing`, on a GPU. */
  timing?: Timing;
  /** What ran. */
  plan: Plan;
}

/** What runs for a request. */
export interface Plan {
  kernel: string;
  /** Bytes of tensors that are copied to where the kernels are, and back; 0 where `GPUBuffer`s are read as they lie. */
  bytes_copied: number;
  /** Multiplications and additions of both products. */
  flops: number;
  /** The plan in words, row by row. */
  rows: [name: string, text: string][];
}

type Optional = "mask" | "sinks" | "alibi_slopes" | "out";
const OPTIONAL: Optional[] = ["mask", "sinks", "alibi_slopes", "out"];

interface Request extends Record<string, unknown> {
  gpu: unknown;
  in_buffers: boolean;
}

interface Read {
  request: Request;
  tensors: Record<string, Tensor>;
  given: Record<string, Given>;
  are_buffers: boolean;
}

/** The request of these tensors and options, as the module reads it. */
function read(q: Tensor, k: Tensor, v: Tensor, options: Options): Read {
  const tensors: Record<string, Tensor> = { q, k, v };
  for (const name of OPTIONAL) if (options[name] != null) tensors[name] = options[name];
  const buffers = new Buffers();
  const given = Object.fromEntries(Object.entries(tensors).map(([name, tensor]) => [name, buffers.given(name, tensor)]));
  const are_buffers = isGpuBuffer(q.data);
  const other = Object.entries(tensors).find(([, tensor]) => isGpuBuffer(tensor.data) !== are_buffers);
  if (other) {
    const [name, tensor] = other;
    throw new RaptError("KindError", `${name} is ${said(tensor.data)}, q is ${said(q.data)}: all tensors of one call are arrays or GPUBuffers`, `\`device.queue.writeBuffer(…)\` of what is an array`, name);
  }
  return { request: { ...given, options: parse(options), gpu: null, in_buffers: are_buffers }, tensors, given, are_buffers };
}

function plan_of({ kernel, bytes_copied, flops, rows }: Answer): Plan {
  return { kernel, bytes_copied, flops, rows };
}

/** The GPU that `options` ask for, if they ask for one. */
async function gpuOf({ device }: Options, are_buffers: boolean): Promise<Gpu | undefined> {
  const is_device = typeof device === "object" && device !== null && typeof device.createBuffer === "function";
  if (are_buffers && !is_device) {
    throw new RaptError("OptionError", `device = ${said(device ?? null)}; allowed: the GPUDevice whose GPUBuffers are given, which they do not tell`, "`device` beside the other options");
  }
  if (is_device) return Gpu.of(device);
  if (device === "webgpu") return ofPage();
  if (device === undefined || device === null || device === "wasm") return undefined;
  throw new RaptError("OptionError", `device = ${said(device)}; allowed: "wasm", "webgpu", a GPUDevice`);
}

/** The bytes of an input that are copied. */
function bytesOf(tensor: Tensor, begin: number, len: number): Uint8Array<ArrayBufferLike> {
  return new Uint8Array((tensor.data as HostArray).buffer, begin, len);
}

/** The result of the host: what was given, written as it lies, or memory of its own. */
function delivered(bytes: ArrayBuffer, output: Output, given: Tensor | undefined, like: unknown): Result {
  const { dtype, shape, strides } = output;
  if (given) {
    scatter(bytes, given, strides, SIZES[dtype]);
    return { ...given, data: given.data as HostArray, shape, strides, dtype };
  }
  return { data: arrayOn(bytes, dtype, like), shape, strides, dtype };
}

function attended(answer: Answer, bytes: Record<string, ArrayBuffer>, { tensors }: Read): Attended {
  const like = tensors["q"]!.data;
  const result: Attended = { out: delivered(bytes["out"]!, answer.out, tensors["out"], like), plan: plan_of(answer) };
  if (answer.lse) result.lse = delivered(bytes["lse"]!, answer.lse, undefined, undefined);
  return result;
}

/** The tensors of a request in the module's memory, and the request of them. */
function copiesIn(module: Module, answer: Answer, { request, tensors, given }: Read, outputs: Record<string, Output>): { copied: object; blocks: Record<string, Block> } {
  const blocks: Record<string, Block> = {};
  const copied: Record<string, unknown> = { ...request, in_buffers: false, is_copied: true };
  const placed = (name: string, of: Partial<Given>) => {
    const block = blocks[name]!;
    return { ...of, buffer: 0, begin_bytes: block.address, len_bytes: block.len, is_storage: false };
  };
  try {
    for (const { tensor, len_bytes } of answer.copies) blocks[tensor] = module.alloc(len_bytes);
    for (const [name, { len_bytes }] of Object.entries(outputs)) blocks[name] = module.alloc(len_bytes);
  } catch (error) {
    free(blocks);
    throw error;
  }
  for (const { tensor, begin_bytes, len_bytes, offset } of answer.copies) {
    blocks[tensor]!.bytes().set(bytesOf(tensors[tensor]!, begin_bytes, len_bytes));
    copied[tensor] = placed(tensor, { ...given[tensor]!, offset });
  }
  for (const [name, { dtype, shape }] of Object.entries(outputs)) copied[name] = placed(name, { dtype, shape, strides: null, offset: 0 });
  return { copied, blocks };
}

function free(blocks: Record<string, Block>): void {
  for (const block of Object.values(blocks)) block.free();
}

function outputsOf(answer: Answer): Record<string, Output> {
  return answer.lse ? { out: answer.out, lse: answer.lse } : { out: answer.out };
}

function onWasm(module: Module, asked: Read): Attended {
  const answer = module.plan(asked.request);
  const outputs = outputsOf(answer);
  const { copied, blocks } = copiesIn(module, answer, asked, outputs);
  try {
    module.run(copied);
    const bytes = Object.fromEntries(Object.keys(outputs).map((name) => [name, blocks[name]!.bytes().slice().buffer]));
    return attended(answer, bytes, asked);
  } finally {
    free(blocks);
  }
}

/**
 * Attention of `q`, `k` and `v` as they lie: `[batch, heads, len, head_dim]`, `[heads, len, head_dim]` or `[len, head_dim]`.
 *
 * With `device` a `GPUDevice` and `GPUBuffer`s the result is a `GPUBuffer` of that device, and what is submitted later comes after it.
 */
export async function attention<Data extends HostArray | GPUBuffer>(
  q: Tensor & { data: Data },
  k: Tensor,
  v: Tensor,
  options: Options = {},
): Promise<Attended<Data extends GPUBuffer ? GPUBuffer : HostArray>> {
  type Answered = Attended<Data extends GPUBuffer ? GPUBuffer : HostArray>;
  const asked = read(q, k, v, options);
  const module = await loadModule();
  const gpu = await gpuOf(options, asked.are_buffers);
  if (!gpu) return onWasm(module, asked) as Answered;
  const answer = module.plan({ ...asked.request, gpu: gpu.limits() });
  const work = answer.gpu!;
  const timing = options.timing === true;
  if (asked.are_buffers) return (await inBuffers(module, gpu, asked, answer, timing)) as Answered;
  const inputs = Object.fromEntries(
    answer.copies.map(({ tensor, begin_bytes, len_bytes }) => [tensor === "alibi_slopes" ? "alibi" : tensor, bytesOf(asked.tensors[tensor]!, begin_bytes, len_bytes)]),
  );
  const lengths = Object.fromEntries(Object.entries(outputsOf(answer)).map(([name, { len_bytes }]) => [name, len_bytes]));
  const ran = await gpu.onHost(module, work, inputs, lengths, timing);
  const result = attended(answer, ran.bytes, asked);
  if (ran.timing) result.timing = ran.timing;
  return result as Answered;
}

async function inBuffers(module: Module, gpu: Gpu, asked: Read, answer: Answer, timing: boolean): Promise<Attended<GPUBuffer>> {
  const buffers: Record<string, GPUBuffer> = {};
  for (const [name, tensor] of Object.entries(asked.tensors)) buffers[name === "alibi_slopes" ? "alibi" : name] = tensor.data as GPUBuffer;
  for (const [name, { len_bytes }] of Object.entries(outputsOf(answer))) buffers[name] ??= await gpu.output(len_bytes);
  const timed = await gpu.run(module, answer.gpu!, buffers, timing);
  const result = (name: "out" | "lse", { dtype, shape, strides }: Output): Result<GPUBuffer> => {
    const given = asked.tensors[name];
    return { ...given, data: buffers[name]!, shape, strides, dtype };
  };
  const whole: Attended<GPUBuffer> = { out: result("out", answer.out), plan: plan_of(answer) };
  if (answer.lse) whole.lse = result("lse", answer.lse);
  if (timed) whole.timing = timed;
  return whole;
}

/** As `attention` with `device: "wasm"`, at once. `load` has ended before. */
export function attentionSync(q: Tensor, k: Tensor, v: Tensor, options: Options = {}): Attended {
  const asked = read(q, k, v, options);
  if (asked.are_buffers || (options.device != null && options.device !== "wasm")) {
    throw new RaptError("OptionError", `device = ${said(options.device ?? null)}; allowed here: "wasm", with arrays of the host`, "`await attention(…)`");
  }
  return onWasm(current(), asked);
}

/** What `attention` would run for these tensors and options, without running it. */
export async function explain(q: Tensor, k: Tensor, v: Tensor, options: Options = {}): Promise<Plan> {
  const asked = read(q, k, v, options);
  const module = await loadModule();
  const gpu = await gpuOf(options, asked.are_buffers);
  return plan_of(module.plan({ ...asked.request, gpu: gpu?.limits() ?? null }));
}

/** What the definition says of these tensors of the host, in float64: the reference that every kernel is judged by. Slow. */
export async function reference(q: Tensor, k: Tensor, v: Tensor, options: Options = {}): Promise<{ out: Float64Array; lse: Float64Array; shape: number[] }> {
  const asked = read(q, k, v, { ...options, device: null, return_lse: true, timing: false });
  const module = await loadModule();
  const answer = module.plan(asked.request);
  const count = (shape: readonly number[]) => shape.reduce((product, n) => product * n, 1);
  const [out, lse] = [count(answer.out.shape), count(answer.lse!.shape)];
  const { copied, blocks } = copiesIn(module, answer, asked, outputsOf(answer));
  const into = module.alloc(8 * (out + lse));
  try {
    module.reference(copied, into);
    const numbers = new Float64Array(into.bytes().slice().buffer);
    return { out: numbers.slice(0, out), lse: numbers.slice(out, out + lse), shape: answer.out.shape };
  } finally {
    free({ ...blocks, into });
  }
}

/** Fetches and compiles the WebAssembly module, which other functions do where it is needed; of `bytes` where they are given. */
export async function load(bytes?: BufferSource): Promise<void> {
  await loadModule(bytes);
}

/** The names of all kernels for GPUs. */
export async function kernels(): Promise<string[]> {
  return (await loadModule()).kernels();
}

/** The text in WGSL of the kernel of this name. */
export async function source(kernel: string): Promise<string> {
  return (await loadModule()).source(kernel);
}
