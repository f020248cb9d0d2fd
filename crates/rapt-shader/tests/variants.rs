//! Every variant that select can name is text that naga reads and validates, within the limits that every WebGPU device has.

use std::sync::LazyLock;

use naga::front::wgsl;
use naga::valid::{Capabilities, ValidationFlags, Validator};
use naga::{AddressSpace, ArraySize, Module, TypeInner};
use rapt_core::DType;
use rapt_shader::{Algorithm, Binding, Caps, KernelVariant, Params, Stores, lane_variants, matrix_variants, variants};

/// Of each tiles of matrices the variant without a mask; and of one the variants of every mask, and of every out.
fn of_matrices() -> Vec<KernelVariant> {
    let mut all = matrix_variants();
    let first = all[0].algorithm;
    let plain = (DType::F16, Stores::Halves);
    let is_split = |of: &KernelVariant| of.bindings().iter().any(|binding| binding.tensor == "partials");
    all.retain(|of| match ((of.out, of.stores) == plain || is_split(of), of.mask) {
        (true, None) => true,
        (true, _) | (_, None) => of.algorithm == first,
        _ => false,
    });
    all
}

/// Every variant with its text as naga reads it, once for all tests.
fn parsed() -> &'static [(KernelVariant, Module)] {
    static PARSED: LazyLock<Vec<(KernelVariant, Module)>> = LazyLock::new(|| {
        let parsed = |variant: KernelVariant| {
            let text = variant.source();
            let module = wgsl::parse_str(&text);
            (variant, module.unwrap_or_else(|error| panic!("{variant}: {}", error.emit_to_string(&text))))
        };
        variants().into_iter().chain(lane_variants()).chain(of_matrices()).map(parsed).collect()
    });
    &PARSED
}

#[test]
fn every_variant_is_valid() {
    assert_eq!(
        parsed().len(),
        6 * (3 * 5 * 5) + 3 * (3 * 5) + 5 + (12 + 8 + 4 + 8 + 4 + 4) + (8 + 8 + 4 + 4),
        "storage, mask, and out with its stores, as far as an algorithm has them"
    );
    for (variant, module) in parsed() {
        // 16-bit integers are asked for where they are stored, and nowhere else.
        let sixteen = Capabilities::SHADER_INT16;
        let of_stores = if variant.stores == Stores::Halves { sixteen } else { Capabilities::empty() };
        let needs = match variant.algorithm {
            Algorithm::Matrices(_) => {
                of_stores
                    | Capabilities::SHADER_FLOAT16_IN_FLOAT32
                    | Capabilities::SHADER_FLOAT16
                    | Capabilities::SUBGROUP
                    | Capabilities::COOPERATIVE_MATRIX
            }
            Algorithm::Lanes => of_stores | Capabilities::SUBGROUP,
            _ => of_stores,
        };
        let mut validator = Validator::new(ValidationFlags::all(), needs);
        validator.validate(module).unwrap_or_else(|error| panic!("{variant}: {error:?}"));
        if variant.stores == Stores::Halves {
            let mut validator = Validator::new(ValidationFlags::all(), needs - sixteen);
            assert!(validator.validate(module).is_err(), "{variant} stores 16 bits");
        }
        let entry = &module.entry_points[0];
        assert_eq!((entry.name.as_str(), entry.workgroup_size), (variant.entry(), [variant.threads() as u32, 1, 1]));
    }
}

#[test]
fn workgroup_memory_is_what_a_variant_says_and_that_of_generic_is_everywhere() {
    for (variant, module) in parsed() {
        let shared = module.global_variables.iter().filter(|(_, of)| of.space == AddressSpace::WorkGroup);
        let bytes: u32 = shared.map(|(_, of)| module.types[of.ty].inner.size(module.to_ctx())).sum();
        assert_eq!(bytes as usize, variant.shared_bytes(), "{variant}");
        let least = Caps::WEBGPU;
        let is_everywhere = variant.shared_bytes() <= least.max_shared_bytes && variant.threads() <= least.max_threads;
        assert!(is_everywhere || variant.algorithm != Algorithm::Generic, "{variant}");
    }
}

#[test]
fn the_parameters_lie_where_the_text_says() {
    for (_, module) in parsed() {
        let (_, params) = module.global_variables.iter().find(|(_, of)| of.name.as_deref() == Some("given")).unwrap();
        assert_eq!(params.binding.as_ref().unwrap().binding, 0);
        let TypeInner::Struct { members, span } = &module.types[params.ty].inner else { panic!("a struct") };
        assert_eq!(*span as usize, Params::BYTES);
        let declared: Vec<(String, usize)> =
            members.iter().map(|member| (member.name.clone().unwrap(), member.offset as usize)).collect();
        let written: Vec<(String, usize)> =
            Params::offsets().into_iter().map(|(name, offset)| (name.to_owned(), offset)).collect();
        assert_eq!(declared, written);
        assert_eq!(Params::default().bytes().len(), Params::BYTES);
    }
}

#[test]
fn the_buffers_are_those_of_the_list() {
    for (variant, module) in parsed() {
        let buffers = module.global_variables.iter().filter_map(|(_, of)| match of.space {
            AddressSpace::Storage { access } if of.name.as_deref() != Some("given") => {
                let TypeInner::Array { size: ArraySize::Dynamic, .. } = module.types[of.ty].inner else {
                    panic!("an array")
                };
                let binding = of.binding.as_ref().unwrap();
                let is_output = access.contains(naga::StorageAccess::STORE);
                Some((of.name.clone().unwrap(), binding.group, binding.binding, is_output))
            }
            _ => None,
        });
        let listed = |binding: &Binding| (binding.tensor.to_owned(), 0, binding.index, binding.is_output);
        assert_eq!(buffers.collect::<Vec<_>>(), variant.bindings().iter().map(listed).collect::<Vec<_>>(), "{variant}");
    }
}

#[test]
fn a_text_names_no_number_that_wgsl_forbids_and_no_subgroup() {
    for variant in variants() {
        let text = variant.source();
        let code: String = text.lines().map(|line| line.split("//").next().unwrap_or_default()).collect();
        // Halves and exponentials of matrices are rounded to 16 bits by whatever computes them.
        for word in ["subgroup", "f16(", "exp(", "exp2(", "log(", "tanh(", "isNan", "pack2x16", "unpack2x16"] {
            assert!(!code.contains(&format!(" {word}")) && !code.contains(&format!("({word}")), "{variant}: {word}");
        }
        assert_eq!(variant.out == DType::F32, !code.contains("atomicAnd") && !code.contains("u16("), "{variant}");
    }
}
