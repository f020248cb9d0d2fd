/** Tensors as a page gives them, and as the WebAssembly module reads of them. */

import { RaptError } from "./errors.js";

/** The dtypes that attention computes; a boolean mask has `"bool"` besides. */
export type DType = "float64" | "float32" | "float16" | "bfloat16" | "bool";

/** An array of the host. bfloat16 is the bits of a `Uint16Array`, and so is float16 where there is no `Float16Array`. */
export type HostArray = Float64Array | Float32Array | Float16Array | Uint16Array | Uint8Array;

/** A tensor of at most four dimensions, where it lies. */
export interface Tensor {
  /** Its numbers, with whatever lies between them. */
  data: HostArray | GPUBuffer;
  /** Sizes, outermost first. */
  shape: readonly number[];
  /** Needed for a `Uint16Array`, a `Uint8Array` and a `GPUBuffer`, which do not tell it. */
  dtype?: DType;
  /** In elements, of any sign, 0 for an input that repeats; row-major where there are none. */
  strides?: readonly number[];
  /** Where element 0 lies in `data`, in elements. */
  offset?: number;
}

/** What the module reads of a tensor. */
export interface Given {
  dtype: string;
  shape: number[];
  strides: number[] | null;
  offset: number;
  buffer: number;
  begin_bytes: number;
  len_bytes: number;
  is_storage: boolean;
}

/** Element sizes of the dtypes, in bytes. */
export const SIZES: Record<DType, number> = { float64: 8, float32: 4, float16: 2, bfloat16: 2, bool: 1 };

/** What the elements of an array are; where several dtypes stand, the first is none that attention computes, and one of the others is to be said. */
const DTYPES: Record<string, string[]> = {
  Float64Array: ["float64"],
  Float32Array: ["float32"],
  Float16Array: ["float16"],
  Uint16Array: ["uint16", "float16", "bfloat16"],
  Uint8Array: ["uint8", "bool"],
  Uint8ClampedArray: ["uint8"],
  Int8Array: ["int8"],
  Int16Array: ["int16"],
  Int32Array: ["int32"],
  Uint32Array: ["uint32"],
  BigInt64Array: ["int64"],
  BigUint64Array: ["uint64"],
};

export function isGpuBuffer(data: unknown): data is GPUBuffer {
  const buffer = data as Partial<GPUBuffer> | null;
  return typeof buffer === "object" && buffer !== null && typeof buffer.mapAsync === "function" && typeof buffer.usage === "number";
}

const STORAGE = 0x80;

/** Above this no array of a page reaches. */
const MOST = 2 ** 31;

function whole(name: string, what: string, list: unknown, least: number): number[] {
  const is = Array.isArray(list) && list.every((n) => Number.isSafeInteger(n) && n >= least);
  if (!is) {
    const allowed = least < 0 ? "integers" : "integers from 0 up";
    throw new RaptError("ShapeError", `${what} of ${name} is ${said(list)}; allowed is an array of ${allowed}`, "", name);
  }
  if (list.some((n) => Math.abs(n) >= MOST)) {
    throw new RaptError("ShapeError", `${what} of ${name} is [${list}]; sizes and strides are below 2^31`, "", name);
  }
  return [...list];
}

/** A value in an error's words. */
export function said(value: unknown): string {
  if (typeof value === "string") return JSON.stringify(value);
  if (Array.isArray(value)) return `[${value.map(said).join(", ")}]`;
  if (typeof value === "object" && value !== null) return `a ${value.constructor?.name ?? "value"}`;
  return typeof value === "function" ? "a function" : String(value);
}

function dtypeOf(name: string, tensor: Tensor): string {
  const { data, dtype } = tensor;
  if (isGpuBuffer(data)) {
    if (dtype === undefined) {
      throw new RaptError("UnsupportedDtypeError", `${name} is a GPUBuffer, which does not tell its dtype`, '`dtype: "float32"` beside `data`, or what it holds', name);
    }
    return dtype;
  }
  const kind = ArrayBuffer.isView(data) ? data.constructor.name : "";
  const allowed = DTYPES[kind];
  if (allowed === undefined) {
    throw new RaptError("KindError", `data of ${name} is ${said(data)}, no typed array and no GPUBuffer`, `\`Float32Array.from(…)\` as data of ${name}`, name);
  }
  if (dtype === undefined && allowed.length > 1) {
    const [, ...meant] = allowed;
    throw new RaptError("UnsupportedDtypeError", `${name} is a ${kind}, which does not tell its dtype`, meant.map((one) => `\`dtype: "${one}"\``).join(" or ") + " beside `data`, whichever it holds", name);
  }
  const own = dtype ?? allowed[0]!;
  if (!(own in SIZES) && dtype !== undefined) {
    throw new RaptError("UnsupportedDtypeError", `${name} has dtype ${said(dtype)}; there are ${Object.keys(SIZES).join(", ")}`, `\`dtype: "${allowed.at(-1)}"\``, name);
  }
  if (!allowed.includes(own)) {
    const holds = allowed.length > 1 ? allowed.slice(1).join(" or ") : allowed[0];
    throw new RaptError("DtypeMismatchError", `${name} is a ${kind}, which holds ${holds}, and its dtype says ${said(own)}`, `\`dtype: "${allowed.at(-1)}"\`, or an array of ${own}`, name);
  }
  return own;
}

/** The arrays and buffers of one request, by number. */
export class Buffers {
  private readonly list: (ArrayBufferLike | GPUBuffer)[] = [];

  private number(of: ArrayBufferLike | GPUBuffer): number {
    const at = this.list.indexOf(of);
    return at >= 0 ? at : this.list.push(of) - 1;
  }

  /** What the module reads of `tensor`. */
  given(name: string, tensor: Tensor): Given {
    if (typeof tensor !== "object" || tensor === null) {
      throw new RaptError("KindError", `${name} is ${said(tensor)}`, `\`{ data, shape }\` as ${name}`, name);
    }
    const dtype = dtypeOf(name, tensor);
    const shape = whole(name, "shape", tensor.shape, 0);
    const strides = tensor.strides === undefined ? null : whole(name, "strides", tensor.strides, -Infinity);
    const [offset] = whole(name, "offset", [tensor.offset ?? 0], 0);
    const { data } = tensor;
    const place = isGpuBuffer(data)
      ? { buffer: this.number(data), begin_bytes: 0, len_bytes: data.size, is_storage: (data.usage & STORAGE) !== 0 }
      : { buffer: this.number(data.buffer), begin_bytes: data.byteOffset, len_bytes: data.byteLength, is_storage: false };
    return { dtype, shape, strides, offset: offset!, ...place };
  }
}

type Maker = new (buffer: ArrayBuffer) => HostArray;

/** An array of `dtype` on `buffer`, of the class of `like` where that holds it. */
export function arrayOn(buffer: ArrayBuffer, dtype: DType, like: unknown): HostArray {
  const own = ArrayBuffer.isView(like) && DTYPES[like.constructor.name]?.includes(dtype);
  if (own) return new (like.constructor as Maker)(buffer);
  switch (dtype) {
    case "float64":
      return new Float64Array(buffer);
    case "float32":
      return new Float32Array(buffer);
    case "float16":
      return typeof Float16Array === "undefined" ? new Uint16Array(buffer) : new Float16Array(buffer);
    case "bfloat16":
      return new Uint16Array(buffer);
    case "bool":
      return new Uint8Array(buffer);
  }
}

type Words = Float64Array | Uint32Array | Uint16Array | Uint8Array;

/** Bytes as words of this size: bits are moved, never numbers. */
function words(buffer: ArrayBufferLike, begin: number, bytes: number, size: number): Words {
  switch (size) {
    case 8:
      // No bits change: both sides are integers of 32 bits, two a number.
      return new Uint32Array(buffer, begin, bytes / 4);
    case 4:
      return new Uint32Array(buffer, begin, bytes / 4);
    case 2:
      return new Uint16Array(buffer, begin, bytes / 2);
    default:
      return new Uint8Array(buffer, begin, bytes);
  }
}

/** Writes row-major elements to `tensor`, and nothing between them. */
export function scatter(from: ArrayBuffer, tensor: Tensor, strides: readonly number[], size: number): void {
  const data = tensor.data as HostArray;
  const source = words(from, 0, from.byteLength, size);
  const target = words(data.buffer, data.byteOffset, data.byteLength, size);
  const each = size === 8 ? 2 : 1;
  const { shape } = tensor;
  const index = shape.map(() => 0);
  let at = (tensor.offset ?? 0) * each;
  for (let n = 0; n < source.length; n += each) {
    for (let word = 0; word < each; word++) target[at + word] = source[n + word]!;
    for (let d = shape.length - 1; d >= 0; d--) {
      index[d]!++;
      at += strides[d]! * each;
      if (index[d]! < shape[d]!) break;
      at -= index[d]! * strides[d]! * each;
      index[d] = 0;
    }
  }
}
