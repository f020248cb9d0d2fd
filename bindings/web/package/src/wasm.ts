/**
 * The WebAssembly module: its memory, and its functions, which take a text and answer one.
 *
 * A panic there is a trap: the module is thrown away, and the next call has a new one.
 */

import { RaptError, type ErrorCode } from "./errors.js";
import type { DType } from "./tensors.js";

interface Exports extends WebAssembly.Exports {
  memory: WebAssembly.Memory;
  rapt_begin(): void;
  rapt_alloc(len: number): number;
  rapt_free(address: number, len: number): void;
  rapt_plan(address: number, len: number): bigint;
  rapt_source(address: number, len: number): bigint;
  rapt_kernels(): bigint;
  rapt_run(address: number, len: number): bigint;
  rapt_reference(address: number, len: number, into: number, count: number): bigint;
  rapt_last_panic(): bigint;
}

/** Bytes of an `ArrayBuffer` that are copied. */
export interface Span {
  tensor: string;
  begin_bytes: number;
  len_bytes: number;
  offset: number;
}

export interface Output {
  dtype: DType;
  shape: number[];
  strides: number[];
  len_bytes: number;
}

export interface Pipeline {
  name: string;
  entry: string;
  bindings: [index: number, tensor: string, is_output: boolean][];
}

export interface OnGpu {
  kernels: Pipeline[];
  windows: { ranges: Record<string, [offset: number, size: number]>; params: number[]; groups: [number, number][] }[];
  workspace_bytes: number;
}

/** What a request takes. */
export interface Answer {
  rows: [string, string][];
  kernel: string;
  bytes_copied: number;
  flops: number;
  copies: Span[];
  out: Output;
  lse: Output | null;
  gpu: OnGpu | null;
}

type Reply<T> = { done: T } | { refused: { code: ErrorCode; message: string; hint: string; tensor: string | null } };

/** A block of the module's memory. */
export class Block {
  constructor(
    private readonly exports: Exports,
    readonly address: number,
    readonly len: number,
  ) {}

  /** Its bytes. Memory that grows takes them elsewhere: ask again after each call. */
  bytes(): Uint8Array<ArrayBuffer> {
    return new Uint8Array(this.exports.memory.buffer as ArrayBuffer, this.address, this.len);
  }

  free(): void {
    this.exports.rapt_free(this.address, this.len);
  }
}

export class Module {
  private constructor(
    private readonly compiled: WebAssembly.Module,
    private exports: Exports,
  ) {}

  static async compile(bytes: BufferSource): Promise<Module> {
    const compiled = await WebAssembly.compile(bytes);
    return new Module(compiled, Module.begin(compiled));
  }

  private static begin(compiled: WebAssembly.Module): Exports {
    const exports = new WebAssembly.Instance(compiled).exports as Exports;
    exports.rapt_begin();
    return exports;
  }

  alloc(len: number): Block {
    const address = this.guarded((exports) => exports.rapt_alloc(len)) >>> 0;
    if (address === 0) throw new RaptError("DeviceError", `${len} bytes of WebAssembly's memory could not be allocated`, '`device: "webgpu"`, or fewer heads at a time');
    return new Block(this.exports, address, len);
  }

  plan(request: object): Answer {
    return this.call((exports, address, len) => exports.rapt_plan(address, len), JSON.stringify(request));
  }

  source(kernel: string): string {
    return this.call((exports, address, len) => exports.rapt_source(address, len), kernel);
  }

  kernels(): string[] {
    return this.call((exports) => exports.rapt_kernels(), "");
  }

  run(request: object): void {
    this.call((exports, address, len) => exports.rapt_run(address, len), JSON.stringify(request));
  }

  reference(request: object, into: Block): void {
    const call = (exports: Exports, address: number, len: number) => exports.rapt_reference(address, len, into.address, into.len / 8);
    this.call(call, JSON.stringify(request));
  }

  private call<T>(call: (exports: Exports, address: number, len: number) => bigint, text: string): T {
    const bytes = new TextEncoder().encode(text);
    const block = this.alloc(bytes.length);
    block.bytes().set(bytes);
    const reply = this.guarded((exports) => {
      const answered = Module.text(exports, call(exports, block.address, block.len));
      block.free();
      return answered;
    });
    const parsed = JSON.parse(reply) as Reply<T>;
    if ("done" in parsed) return parsed.done;
    const { code, message, hint, tensor } = parsed.refused;
    throw new RaptError(code, message, hint, tensor ?? undefined);
  }

  /** A text that the module gave. */
  private static text(exports: Exports, packed: bigint): string {
    const address = Number((packed >> 32n) & 0xffffffffn);
    const len = Number(packed & 0xffffffffn);
    if (address === 0) throw new RaptError("DeviceError", "WebAssembly's memory has no room for an answer");
    const text = new TextDecoder().decode(new Uint8Array(exports.memory.buffer, address, len).slice());
    exports.rapt_free(address, len);
    return text;
  }

  private guarded<T>(work: (exports: Exports) => T): T {
    const { exports } = this;
    try {
      return work(exports);
    } catch (error) {
      if (!(error instanceof WebAssembly.RuntimeError)) throw error;
      let why = error.message;
      try {
        why = Module.text(exports, exports.rapt_last_panic()) || why;
      } catch {
        // The trap's own words then.
      }
      this.exports = Module.begin(this.compiled);
      throw new RaptError("UnsupportedError", `the module stopped (${why}); this is a defect of Rapt, please report it`);
    }
  }
}

async function read(url: URL): Promise<BufferSource> {
  if (url.protocol === "file:") {
    const { readFile } = await import(/* webpackIgnore: true */ /* @vite-ignore */ `node:fs/${"promises"}`);
    return readFile(url);
  }
  const response = await fetch(url);
  if (!response.ok) throw new RaptError("DeviceError", `${url} answered ${response.status}`, "serve the package's *.wasm beside its index.js, or give `load` the bytes of one");
  return response.arrayBuffer();
}

let loaded: Module | undefined;
let loading: Promise<Module> | undefined;

// A module of one function, which answers a vector.
const WITH_VECTORS = [0, 97, 115, 109, 1, 0, 0, 0, 1, 5, 1, 96, 0, 1, 123, 3, 2, 1, 0, 10, 10, 1, 8, 0, 65, 0, 253, 15, 253, 98, 11];

/** The module for this engine: an engine without 128-bit vectors refuses one that has them. */
function ownModule(): URL {
  const has_vectors = WebAssembly.validate(new Uint8Array(WITH_VECTORS));
  return has_vectors ? new URL("./rapt-simd128.wasm", import.meta.url) : new URL("./rapt.wasm", import.meta.url);
}

/** The module, fetched and compiled once; of `bytes` where they are given. */
export function load(bytes?: BufferSource): Promise<Module> {
  loading ??= (async () => {
    try {
      loaded = await Module.compile(bytes ?? (await read(ownModule())));
      return loaded;
    } catch (error) {
      loading = undefined;
      throw error;
    }
  })();
  return loading;
}

/** The module, which was loaded. */
export function current(): Module {
  if (loaded === undefined) throw new RaptError("DeviceError", "the WebAssembly module is not loaded yet", "`await load()` once, before");
  return loaded;
}
