/** Refusals: one class, whose code is the name of the class that the Python package has for the same cause. */

export type ErrorCode =
  | "DtypeMismatchError"
  | "UnsupportedDtypeError"
  | "ShapeError"
  | "LayoutError"
  | "OptionError"
  | "DeviceError"
  | "KindError"
  | "UnsupportedError";

/** Why a request was refused. Nothing was written. */
export class RaptError extends Error {
  /** The family of causes. */
  readonly code: ErrorCode;
  /** The expression that corrects the request; empty where the message says it already. */
  readonly hint: string;
  /** The tensor of which it speaks, where it speaks of one. */
  readonly tensor: string | undefined;

  constructor(code: ErrorCode, message: string, hint = "", tensor?: string) {
    super(hint === "" ? message : `${message}. Mend: ${hint}`);
    this.name = "RaptError";
    this.code = code;
    this.hint = hint;
    this.tensor = tensor;
  }
}
