//! `rapt run`: attention on .npy files.
//!
//! Files of int8 and uint8 are codes where factors are given for them; codes of other formats are files of bytes, and their format
//! is said. Deliberately absent: rows of an odd number of codes that share bytes, whose head_dim no file tells.

use std::path::{Path, PathBuf};

use clap::Args as ClapArgs;
use rapt::quant::{Measured, QuantizedView, measure};
use rapt::{
    Backing, Codes, DType, Device, Engine, Error, Format, Operands, Options, Qkv, ScaleLayout, Shape, Spec, Tensor,
    Tensors, Tolerance, View,
};

use crate::codes::{CodesArgs, CodesName, hinted, part_names};
use crate::explain::dtype;
use crate::npy::{self, Array};
use crate::options::ProblemArgs;
use crate::{Host, Outcome, exit, say};

#[derive(ClapArgs, Debug)]
pub(crate) struct Args {
    /// [batch, heads, q_len, head_dim], or less its leading dimensions; float64, float32 or float16, or codes.
    q: PathBuf,
    /// [batch, kv_heads, kv_len, head_dim].
    k: PathBuf,
    /// [batch, kv_heads, kv_len, head_dim_v].
    v: PathBuf,
    /// Where the result goes.
    out: PathBuf,
    /// A mask, bool (True = attend) or additive, that broadcasts to [batch, heads, q_len, kv_len].
    #[arg(long, value_name = "FILE")]
    mask: Option<PathBuf>,
    /// Where the log of the sum of exponentials goes.
    #[arg(long, value_name = "FILE")]
    lse: Option<PathBuf>,
    /// The dtype of the result [default: that of q]; needed if q is codes.
    #[arg(long, value_name = "DTYPE", value_parser = dtype)]
    out_dtype: Option<DType>,
    /// Where it is computed: cpu, or vulkan:N (vulkan is vulkan:0), an adapter of `rapt doctor`, to which the tensors are copied.
    #[arg(long, value_name = "DEVICE", default_value = "cpu", value_parser = device)]
    device: Device,
    #[command(flatten)]
    problem: ProblemArgs,
    #[command(flatten)]
    codes: CodesArgs,
    #[command(flatten)]
    parts: PartArgs,
    #[command(flatten)]
    tolerance: ToleranceArgs,
}

/// Heads that are judged before they are computed.
#[derive(ClapArgs, Debug)]
#[command(next_help_heading = "Tolerance")]
struct ToleranceArgs {
    /// How far a head may be from that on the originals, in relative L2: heads whose estimated error is larger are computed on those.
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    tolerance: Option<f64>,
    /// What the codes of k were made of.
    #[arg(long, value_name = "FILE", requires = "tolerance")]
    k_original: Option<PathBuf>,
    /// What the codes of v were made of.
    #[arg(long, value_name = "FILE", requires = "tolerance")]
    v_original: Option<PathBuf>,
}

/// What makes numbers of the codes.
#[derive(ClapArgs, Debug)]
#[command(next_help_heading = "Quantized operands")]
struct PartArgs {
    /// The factors of the codes of q: float32 of shape [] (tensor), [B, H] (head), [B, H, S] (token), [B, H, 1, D] (channel) or
    /// [B, H, S, n] (block); for mxfp8, mxfp4 and nvfp4 the bytes of their 8-bit floats.
    #[arg(long, value_name = "FILE")]
    q_descale: Option<PathBuf>,
    /// Those of k.
    #[arg(long, value_name = "FILE")]
    k_descale: Option<PathBuf>,
    /// Those of v.
    #[arg(long, value_name = "FILE")]
    v_descale: Option<PathBuf>,
    /// What is subtracted from uint8 codes of q: uint8, of the shape of the factors.
    #[arg(long, value_name = "FILE")]
    q_zero_point: Option<PathBuf>,
    /// The same of k.
    #[arg(long, value_name = "FILE")]
    k_zero_point: Option<PathBuf>,
    /// The same of v.
    #[arg(long, value_name = "FILE")]
    v_zero_point: Option<PathBuf>,
    /// One more factor of q in nvfp4.
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    q_global_scale: Option<f32>,
    /// The same of k.
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    k_global_scale: Option<f32>,
    /// The same of v.
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    v_global_scale: Option<f32>,
}

pub(crate) fn device(name: &str) -> Result<Device, String> {
    Device::from_name(name).ok_or_else(|| "allowed are cpu, vulkan and vulkan:N".to_owned())
}

/// The files of q, k or v.
struct Files {
    tensor: &'static str,
    array: Array,
    name: Option<CodesName>,
    descale: Option<Array>,
    zero_point: Option<Array>,
    global_scale: Option<f32>,
}

type MaybeCodes<'a> = Option<Box<Codes<'a>>>;

impl Files {
    fn read(
        tensor: &'static str,
        path: &Path,
        name: Option<CodesName>,
        (descale, zero_point, global_scale): (&Option<PathBuf>, &Option<PathBuf>, Option<f32>),
    ) -> Result<Self, npy::Refused> {
        let read = |path: &Option<PathBuf>| path.as_deref().map(Array::read).transpose();
        let (descale, zero_point) = (read(descale)?, read(zero_point)?);
        Ok(Files { tensor, array: Array::read(path)?, name, descale, zero_point, global_scale })
    }

    /// The tensor, and what makes numbers of it if it is codes.
    fn views(&self) -> Result<(View<'_>, MaybeCodes<'_>), Box<dyn std::error::Error>> {
        self.found().map_err(|error| hinted(error, false))
    }

    fn found(&self) -> rapt::Result<(View<'_>, MaybeCodes<'_>)> {
        let Files { tensor, array, name, descale, zero_point, global_scale } = self;
        let [descale_name, zero_point_name, global_name] = part_names(tensor);
        let stored = array.view(tensor)?;
        let Some(format) = name.map(|name| name.format).or_else(|| Format::of_dtype(stored.dtype())) else {
            let given = [
                (descale_name, descale.is_some()),
                (zero_point_name, zero_point.is_some()),
                (global_name, global_scale.is_some()),
            ];
            return match given.into_iter().find(|(_, is_given)| *is_given) {
                Some((part, _)) => Err(beside_numbers(part, tensor, stored.dtype())),
                None => Ok((stored, None)),
            };
        };
        let Some(descale) = descale else {
            let (codes, part) = (format.name(), descale_name);
            return Err(Error::MissingPart { tensor, codes, part });
        };
        let codes = Codes {
            zero_point: zero_point.as_ref().map(|points| points.view(zero_point_name)).transpose()?,
            global_scale: *global_scale,
            granularity: name.and_then(|name| name.granularity),
            scale_layout: name.map_or(ScaleLayout::Plain, |name| name.scale_layout),
            ..Codes::new(format, descale.view_as(descale_name, format.scale_dtype())?)
        };
        Ok((array.view_as(tensor, format.code_dtype())?, Some(Box::new(codes))))
    }
}

/// The refusal of a factor, or of an original, beside a tensor whose elements are what they are.
fn beside_numbers(part: &'static str, tensor: &str, dtype: DType) -> Error {
    let allowed = format!("none: {tensor} has dtype {dtype}, whose elements are numbers and no codes");
    Error::Option { option: part, got: "given".to_owned(), allowed }
}

pub(crate) fn run(args: &Args, host: &dyn Host) -> Outcome {
    let (names, parts) = (args.codes.names(), &args.parts);
    let q = Files::read("q", &args.q, names.q, (&parts.q_descale, &parts.q_zero_point, parts.q_global_scale))?;
    let k = Files::read("k", &args.k, names.k, (&parts.k_descale, &parts.k_zero_point, parts.k_global_scale))?;
    let v = Files::read("v", &args.v, names.v, (&parts.v_descale, &parts.v_zero_point, parts.v_global_scale))?;
    let read = |path: &Option<PathBuf>| path.as_deref().map(Array::read).transpose();
    let mask = read(&args.mask)?;
    let originals = [read(&args.tolerance.k_original)?, read(&args.tolerance.v_original)?];
    attend(args, host, [&q, &k, &v], mask.as_ref(), originals.each_ref().map(Option::as_ref))
}

/// How far codes lie from what they were made of, and that, where it is at hand.
fn measured<'a>(
    tensor: &'static str,
    view: &View<'_>,
    codes: &MaybeCodes<'_>,
    original: Option<&'a Array>,
) -> Result<Option<(Measured, View<'a>)>, Box<dyn std::error::Error>> {
    let Some(original) = original else { return Ok(None) };
    let Some(codes) = codes.as_deref() else {
        let part = if tensor == "k" { "k_original" } else { "v_original" };
        return Err(beside_numbers(part, tensor, view.dtype()).into());
    };
    let original = original.view(tensor)?;
    let quantized = QuantizedView::of_codes(*view, codes, *original.shape())?;
    Ok(Some((measure(&original, &quantized)?, original)))
}

fn backing<'a>(of: &'a Option<(Measured, View<'a>)>) -> Option<Backing<'a>> {
    of.as_ref().map(|(errors, original)| Backing { errors: errors.into(), original: Some(*original) })
}

fn attend(
    args: &Args,
    host: &dyn Host,
    [q, k, v]: [&Files; 3],
    mask: Option<&Array>,
    [of_k, of_v]: [Option<&Array>; 2],
) -> Outcome {
    let ((q, q_codes), (k, k_codes), (v, v_codes)) = (q.views()?, k.views()?, v.views()?);
    let (of_k, of_v) = (measured("k", &k, &k_codes, of_k)?, measured("v", &v, &v_codes, of_v)?);
    let codes = Qkv { q: q_codes, k: k_codes, v: v_codes };
    let mask = mask.map(|mask| mask.view("mask")).transpose()?;
    let options = Options { out_dtype: args.out_dtype, ..args.problem.options() };
    let spec = Spec::builder(&q, &k, &v, &options)
        .codes(codes.as_deref())
        .mask(mask.as_ref())
        .return_lse(args.lse.is_some())
        .build()
        .map_err(|error| hinted(error, false))?;
    let engine = match args.device {
        Device::Cpu => Engine::new(args.problem.threads)?,
        device => Engine::with_offload(host.offload(device)?, args.problem.threads)?,
    };
    let plan = engine.plan(&spec)?;

    let rank = q.shape().len();
    let mut out = Tensor::zeros(spec.out.dtype, spec.out_shape(rank))?;
    let lse_tensor = |lse: &rapt::TensorSpec<3>| {
        let shape = Shape::new(&lse.shape[4 - rank..]).expect("at most three dimensions");
        Tensor::zeros(lse.dtype, shape)
    };
    let mut lse = spec.lse.as_ref().map(lse_tensor).transpose()?;
    let tensors = Tensors {
        codes,
        mask,
        lse: lse.as_mut().map(Tensor::view_mut).transpose()?,
        ..Tensors::new(q, k, v, out.view_mut()?)
    };
    let judgement = match args.tolerance.tolerance {
        None => {
            engine.run(&plan, &mut Operands::check(tensors, &spec)?)?;
            None
        }
        Some(limit) => {
            let tolerance = Tolerance { limit, k: backing(&of_k), v: backing(&of_v) };
            let judged = engine.attention_within(tensors, &options, &tolerance);
            Some(judged.map_err(|error| hinted(error, false))?)
        }
    };

    npy::write(&args.out, &out)?;
    if let Some((path, lse)) = args.lse.as_ref().zip(lse) {
        npy::write(path, &lse)?;
    }
    let key = *plan.key();
    say(&format_args!(
        "{}: {} {}, {} {} on {}",
        args.out.display(),
        out.dtype(),
        out.shape(),
        key.kernel.name(),
        key.storage,
        key.arch.name()
    ))?;
    if let Some(judgement) = judgement {
        say(&format_args!("{}", judgement.to_string().trim_end()))?;
    }
    Ok(exit::OK)
}
