//! q, k and v that are codes of a quantized format, as a command line says it: `FORMAT[:GRANULARITY][:swizzled]`, such as `int8:token`,
//! `int4:block:32`, `nvfp4` or `nvfp4:swizzled`.
//!
//! `explain` describes such operands and `bench` makes them, so both need a granularity: where none is said it is that of
//! `rapt.quantize`. `run` reads it off the factors' shape, and holds what is said against it.

use clap::Args;
use rapt::quant::Scheme;
use rapt::{Error, Format, Granularity, Qkv, ScaleLayout, TensorLayout};

/// Which of q, k and v are codes.
#[derive(Args, Debug)]
#[command(next_help_heading = "Quantized operands")]
pub(crate) struct CodesArgs {
    /// q is codes: int8, uint8, int4, e4m3fn, e5m2, mxfp8, mxfp4 or nvfp4, with a factor for each tensor, head, token, channel or
    /// block:N (N elements of a row), as in int8:token. Factors of 8 bits may lie swizzled, as in nvfp4:swizzled.
    #[arg(long, value_name = "FORMAT[:GRANULARITY][:swizzled]", value_parser = codes_name)]
    q_codes: Option<CodesName>,
    /// k is codes.
    #[arg(long, value_name = "FORMAT[:GRANULARITY][:swizzled]", value_parser = codes_name)]
    k_codes: Option<CodesName>,
    /// v is codes.
    #[arg(long, value_name = "FORMAT[:GRANULARITY][:swizzled]", value_parser = codes_name)]
    v_codes: Option<CodesName>,
    /// k and v are codes.
    #[arg(long, value_name = "FORMAT[:GRANULARITY][:swizzled]", value_parser = codes_name, conflicts_with_all = ["k_codes", "v_codes"])]
    kv_codes: Option<CodesName>,
}

impl CodesArgs {
    /// What is said of each.
    pub(crate) fn names(&self) -> Qkv<Option<CodesName>> {
        Qkv { q: self.q_codes, k: self.k_codes.or(self.kv_codes), v: self.v_codes.or(self.kv_codes) }
    }

    /// The scheme of each, for codes that are described or made.
    pub(crate) fn schemes(&self) -> rapt::quant::Result<Qkv<Option<Scheme>>> {
        let scheme = |name: Option<CodesName>| {
            name.map(|CodesName { format, granularity, scale_layout }| Scheme::new(format, granularity, scale_layout))
                .transpose()
        };
        let Qkv { q, k, v } = self.names();
        Ok(Qkv { q: scheme(q)?, k: scheme(k)?, v: scheme(v)? })
    }
}

/// A format, which elements share a factor where that is said, and how the factors lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CodesName {
    pub(crate) format: Format,
    pub(crate) granularity: Option<Granularity>,
    pub(crate) scale_layout: ScaleLayout,
}

/// `FORMAT[:GRANULARITY][:swizzled]`.
fn codes_name(text: &str) -> Result<CodesName, String> {
    let (text, scale_layout) = match text.strip_suffix(":swizzled") {
        Some(text) => (text, ScaleLayout::Swizzle32x4x4),
        None => (text, ScaleLayout::Plain),
    };
    let (format, granularity) = text.split_once(':').map_or((text, None), |(format, rest)| (format, Some(rest)));
    let format = Format::from_name(format).ok_or_else(|| {
        let names = Format::ALL.map(Format::name).join(", ");
        format!("{format:?} is no format; the known are {names}")
    })?;
    let granularity = granularity.map(granularity_of).transpose()?;
    Scheme::new(format, granularity, scale_layout).map_err(|error| error.to_string())?;
    Ok(CodesName { format, granularity, scale_layout })
}

fn granularity_of(text: &str) -> Result<Granularity, String> {
    let found = match text {
        "tensor" => Some(Granularity::Tensor),
        "head" => Some(Granularity::Head),
        "token" => Some(Granularity::Token),
        "channel" => Some(Granularity::Channel),
        other => other.strip_prefix("block:").and_then(|size| size.parse().ok()).map(Granularity::Block),
    };
    found.ok_or_else(|| {
        format!("{text:?} is no granularity; tensor, head, token, channel and block:N (as in block:32) are")
    })
}

/// What factors, zero points and the global scale of an operand are called.
pub(crate) fn part_names(tensor: &str) -> [&'static str; 3] {
    match tensor {
        "q" => ["q_descale", "q_zero_point", "q_global_scale"],
        "k" => ["k_descale", "k_zero_point", "k_global_scale"],
        _ => ["v_descale", "v_zero_point", "v_global_scale"],
    }
}

/// The shape of the factors of numbers of these sizes.
pub(crate) fn descale_shape(
    [batch, heads, len, dim]: [usize; 4],
    granularity: Granularity,
    layout: TensorLayout,
) -> rapt::Shape {
    let of_rows = |len: usize, last: Option<usize>| {
        let sizes = match layout {
            TensorLayout::Bhsd => [batch, heads, len],
            TensorLayout::Bshd => [batch, len, heads],
        };
        let [a, b, c] = sizes;
        last.map_or([a, b, c].into(), |last| [a, b, c, last].into())
    };
    match granularity {
        Granularity::Tensor => [].into(),
        Granularity::Head => [batch, heads].into(),
        Granularity::Token => of_rows(len, None),
        Granularity::Channel => of_rows(1, Some(dim)),
        Granularity::Block(size) => of_rows(len, Some(dim.div_ceil(size.max(1)))),
    }
}

/// An error, with an option of this command line as a hint: `described` of `explain` and `bench`, where there are no files.
pub(crate) fn hinted(error: Error, described: bool) -> Box<dyn std::error::Error> {
    let hint = match &error {
        Error::MissingPart { tensor, codes, .. } if described => {
            Some(format!("--{tensor}-codes {codes}:token, with --dtype that of the numbers"))
        }
        Error::MissingPart { part, .. } if part.ends_with("global_scale") => {
            Some(format!("--{} X", part.replace('_', "-")))
        }
        Error::MissingPart { part, .. } => Some(format!("--{} FILE", part.replace('_', "-"))),
        Error::Option { option: "tolerance", allowed, .. } if allowed.contains("carries no measured errors") => {
            Some("--k-original FILE and --v-original FILE, what the codes were made of".to_owned())
        }
        Error::Option { option: "out_dtype", got, .. } if got == "None" => Some("--out-dtype float32".to_owned()),
        _ => None,
    };
    match hint {
        Some(hint) => format!("{error}; say {hint}").into(),
        None => error.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_and_granularities_are_read() {
        let check = |text: &str, format, granularity| {
            let name = CodesName { format, granularity, scale_layout: ScaleLayout::Plain };
            assert_eq!(codes_name(text), Ok(name), "{text}");
            let swizzled = codes_name(&format!("{text}:swizzled"));
            match format.own_block_size() {
                Some(_) => assert_eq!(swizzled, Ok(CodesName { scale_layout: ScaleLayout::Swizzle32x4x4, ..name })),
                None => assert!(swizzled.unwrap_err().contains("the scales of"), "{text}"),
            }
        };
        check("int8", Format::Int8, None);
        check("int8:token", Format::Int8, Some(Granularity::Token));
        check("int4:block:32", Format::Int4, Some(Granularity::Block(32)));
        check("mxfp8", Format::Mxfp8, None);
        check("nvfp4:block:16", Format::Nvfp4, Some(Granularity::Block(16)));
        for (wrong, says) in [
            ("int7", "the known are int8, uint8"),
            ("int8:row", "is no granularity"),
            ("int8:block", "block:N"),
            ("int8:block:-1", "block:N"),
            ("int8:block:0", "block_size = 0; allowed: an int from 1 up"),
            ("nvfp4:token", "granularity = token; allowed: None, or block 16"),
            ("", "is no format"),
            ("swizzled", "is no format"),
            ("nvfp4:swizzled:block:16", "is no granularity"),
        ] {
            let why = codes_name(wrong).unwrap_err();
            assert!(why.contains(says), "{wrong}: {why}");
        }
    }
}
