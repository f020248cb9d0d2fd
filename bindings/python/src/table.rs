//! What `rapt.attention` takes: one row an option, from which everything else of these bindings is written.
//!
//! ```text
//! by macros            arguments of functions and methods, what `help` and `inspect` show, parsing, views, the spec
//! when torch is there  the schemas of `torch.ops.rapt`
//! by src/stubs.rs      the signature of `rapt.attention` in Python, and the stubs
//! ```
//! Deliberately absent: q, k and v, and `out`, `out_dtype` and `return_lse`, which choose what is written, and `tolerance` and `device`, which no op of torch has.

/// Gives the rows to `$then!`, as `all`, and of them the `tensors`, the `parts` and the `options` apart.
///
/// A row is a name: `tensor`, `part` of what makes numbers of codes, or a field of [`rapt::Options`] `by` its parser in `api::options`; then as Python text the default, the
/// type in the stubs, and the arguments in the schemas of `torch.ops.rapt`.
macro_rules! attention_options {
    ($then:ident) => {
        sorted_options! { $then all [] tensors [] parts [] options []
            mask: tensor, "None", "Any", "Tensor? mask=None";
            causal: causal by causal, "None", "Causal", "str? causal=None";
            window: window by window, "None", "Window", "SymInt? window_left=None, SymInt? window_right=None";
            softcap: softcap by real, "None", "float | None", "float? softcap=None";
            scale: softmax_scale by real, "None", "float | None", "float? scale=None";
            sinks: tensor, "None", "Any", "Tensor? sinks=None";
            alibi_slopes: tensor, "None", "Any", "Tensor? alibi_slopes=None";
            layout: layout by layout, "'bhsd'", "Layout", "str layout='bhsd'";
            q_descale: part, "None", "Any", "Tensor? q_descale=None";
            k_descale: part, "None", "Any", "Tensor? k_descale=None";
            v_descale: part, "None", "Any", "Tensor? v_descale=None";
            q_zero_point: part, "None", "Any", "Tensor? q_zero_point=None";
            k_zero_point: part, "None", "Any", "Tensor? k_zero_point=None";
            v_zero_point: part, "None", "Any", "Tensor? v_zero_point=None";
            compute: compute by compute, "'exact'", "Compute", "str compute='exact'";
        }
    };
}

/// Takes row after row from the table and puts it where it belongs.
macro_rules! sorted_options {
    ($then:ident all $all:tt tensors $tensors:tt parts $parts:tt options $options:tt) => {
        $then! { all: $all, tensors: $tensors, parts: $parts, options: $options }
    };
    (
        $then:ident all [$($all:tt)*] tensors [$($tensors:tt)*] parts $parts:tt options $options:tt
        $name:ident: tensor, $default:literal, $stub:literal, $schema:literal; $($rest:tt)*
    ) => {
        sorted_options! {
            $then all [$($all)* $name: $default, $stub, $schema;] tensors [$($tensors)* $name,] parts $parts
            options $options $($rest)*
        }
    };
    (
        $then:ident all [$($all:tt)*] tensors $tensors:tt parts [$($parts:tt)*] options $options:tt
        $name:ident: part, $default:literal, $stub:literal, $schema:literal; $($rest:tt)*
    ) => {
        sorted_options! {
            $then all [$($all)* $name: $default, $stub, $schema;] tensors $tensors parts [$($parts)* $name,]
            options $options $($rest)*
        }
    };
    (
        $then:ident all [$($all:tt)*] tensors $tensors:tt parts $parts:tt options [$($options:tt)*]
        $name:ident: $field:ident by $parse:ident, $default:literal, $stub:literal, $schema:literal; $($rest:tt)*
    ) => {
        sorted_options! {
            $then all [$($all)* $name: $default, $stub, $schema;] tensors $tensors parts $parts
            options [$($options)* $name: $field by $parse,] $($rest)*
        }
    };
}

/// What Python shows of `rapt.attention`: its arguments behind `self`, if there is one.
macro_rules! signature {
    ($self:literal, $($name:ident: $default:literal,)*) => {
        concat!(
            "(", $self, "q, k, v, *, ",
            $(stringify!($name), "=", $default, ", ",)*
            "out=None, out_dtype=None, return_lse=False, tolerance=None, device=None)"
        )
    };
}
