//! The same kernels as naga translates them from WGSL: another translator, the same host, the same bits.

use naga::back::msl;
use naga::front::wgsl;
use naga::proc::{BoundsCheckPolicies, BoundsCheckPolicy};
use naga::valid::{Capabilities, ValidationFlags, Validator};
use rapt_core::{Causal, DType, Extent, Kernel, Result, Spec, Tensors, View, Window};
use rapt_shader::{Caps, KernelVariant};
use rapt_testkit::{Case, MaskCase, Places, replay};

use crate::engine::{CAPS, Program, engine_with};
use crate::host::{self, Arithmetic, GROUP, GROUPS};

/// The text of naga for `variant`, as a program of the host.
fn program(variant: &KernelVariant) -> String {
    let module = wgsl::parse_str(&variant.source()).expect("a text that is valid");
    let info = Validator::new(ValidationFlags::all(), Capabilities::empty()).validate(&module).expect("a valid module");
    let slots =
        std::iter::once((0, false)).chain(variant.bindings().iter().map(|binding| (binding.index, binding.is_output)));
    let slots: Vec<(u32, bool)> = slots.collect();
    let mut resources = msl::EntryPointResources::default();
    for (binding, mutable) in &slots {
        let target = msl::BindTarget { buffer: Some(*binding as u8), mutable: *mutable, ..msl::BindTarget::default() };
        resources.resources.insert(naga::ResourceBinding { group: 0, binding: *binding }, target);
    }
    let unchecked = BoundsCheckPolicy::Unchecked;
    let options = msl::Options {
        lang_version: (3, 0),
        per_entry_point_map: [(variant.entry().to_owned(), resources)].into(),
        bounds_check_policies: BoundsCheckPolicies {
            index: unchecked,
            buffer: unchecked,
            ..BoundsCheckPolicies::default()
        },
        zero_initialize_workgroup_memory: false,
        force_loop_bounding: false,
        emit_int_div_checks: false,
        ..msl::Options::default()
    };
    let (text, _) = msl::write_string(&module, &info, &options, &msl::PipelineOptions::default()).expect("a text");
    // Buffers are arrays of one element there, behind which a compiler of C++ sees none; and no simd.h is needed.
    let mut program = text.replace("#include <simd/simd.h>\n", "");
    for line in text.lines().filter(|line| line.starts_with("typedef ") && line.ends_with("[1];")) {
        program = program.replace(line, &line.replace("[1];", "[1 << 28];"));
    }
    // Workgroup memory is a parameter: what is called gives it.
    let shared = text.lines().filter_map(|line| line.strip_prefix(", threadgroup ")?.split_once("& "));
    let shared: Vec<(&str, &str)> = shared.collect();
    let mut statements = String::new();
    for (ty, name) in &shared {
        statements.push_str(&format!(
            "alignas(1 << 16) static {ty} {name};\n    rapt_space(\"{name}\", &{name}, sizeof {name});\n    "
        ));
    }
    let parameters: Vec<&str> = text.lines().filter(|line| line.contains("[[buffer(")).collect();
    assert_eq!(parameters.len(), slots.len());
    let ty = |line: &str| {
        let words = line.trim_start_matches(", ").replace("device ", "").replace("constant ", "");
        words.split_once(" [[").and_then(|(of, _)| of.rsplit_once("& ")).expect("a reference").0.to_owned()
    };
    let buffers = parameters.iter().zip(&slots).map(|(line, (slot, _))| {
        let ty = ty(line);
        format!(", *static_cast<{ty}*>(slots[{slot}])")
    });
    // The last parameter has the lengths of buffers, which nothing asks.
    statements.push_str("static const _mslBufferSizes sizes = {};\n    ");
    let names: String = shared.iter().map(|(_, name)| format!(", {name}")).collect();
    statements.push_str(&format!("attention({GROUP}, {GROUPS}, thread{}{names}, sizes);", buffers.collect::<String>()));
    program + &host::entry(&statements)
}

/// The bytes of out and lse behind each run of `compile`'s programs of `kernel` on `case`, for a device with `caps`.
pub(crate) fn outputs(
    caps: Caps,
    kernel: Kernel,
    case: &Case,
    compile: impl Fn(&KernelVariant) -> Program,
) -> Vec<Vec<u8>> {
    let mut all = Vec::new();
    let mut engine = engine_with(caps, Some(kernel), compile);
    let mut recorded = |spec: &Spec, tensors: Tensors<'_>| -> Result<()> {
        let extent = |view: &View<'_>| match view.extent() {
            Extent::Proven { address, len_bytes } => (address, len_bytes),
            Extent::Declared => panic!("an output has an extent"),
        };
        let outputs = [Some(extent(&tensors.out.as_view())), tensors.lse.as_ref().map(|lse| extent(&lse.as_view()))];
        engine(spec, tensors)?;
        for (address, len_bytes) in outputs.into_iter().flatten() {
            // SAFETY: the whole of a proven extent is readable, and what wrote it has ended.
            let bytes =
                unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance::<u8>(address), len_bytes) };
            all.push(bytes.to_vec());
        }
        Ok(())
    };
    replay(&mut recorded, case).unwrap_or_else(|failure| panic!("{}: {failure}", kernel.name()));
    all
}

#[test]
fn another_translator_gives_the_same_bits() {
    if !host::has_compiler() {
        return;
    }
    let mask = Some(MaskCase { dtype: DType::F32, full: [true, false, true, true], rank: 4, lowest: false });
    let places = Places { q: 14, k: 4, v: 15, mask: 1, vectors: 2, out: 16, lse: 2 };
    for (kernel, q_len, kv_len) in [(Kernel::Generic, 37, 70), (Kernel::Forward, 37, 70), (Kernel::Decode, 2, 300)] {
        let plain = Case {
            num_kv_heads: 2,
            head_dim_v: 21,
            mask,
            places,
            ..Case::plain(DType::F32, [2, 4, q_len, 19], kv_len)
        };
        for case in [
            Case { poison: true, sinks: Some(DType::F32), causal: Some(Causal::TopLeft), ..plain.clone() },
            Case {
                softcap: Some(2.0),
                alibi_slopes: Some(DType::F32),
                window: Window { left: Some(9), right: Some(4) },
                ..plain
            },
        ] {
            let ours =
                outputs(CAPS, kernel, &case, |variant| host::compile(&variant.msl(), variant, Arithmetic::AsWritten));
            let of_naga = outputs(CAPS, kernel, &case, |variant| host::build(&program(variant), Arithmetic::AsWritten));
            assert!(!ours.is_empty() && ours == of_naga, "{}: other bits", kernel.name());
        }
    }
}
