//! Products against mlx's own results.

use flint_cpu::{Arithmetic, Level};
use flint_weights::{Form, HostBytes, PlainType, QuantMatrix};
use safetensors::SafeTensors;

use crate::support::{cpu, linear, single};

const FIXTURE: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/../weights/tests/fixtures/mlx_affine.safetensors");

#[test]
fn products_are_within_1e_5_of_mlx_in_fp32_at_every_width_and_group() {
    let file = std::fs::read(FIXTURE).unwrap();
    let tensors = SafeTensors::deserialize(&file).unwrap();
    let bytes = |name: &str| HostBytes::from_vec(tensors.tensor(name).unwrap().data().to_vec());
    let numbers = |name: &str| -> Vec<f32> {
        let bytes = bytes(name);
        (0..bytes.len() / 4).map(|i| PlainType::F32.read(bytes.as_slice(), i)).collect()
    };
    let x = numbers("F32.x");
    for bits in [2, 3, 4, 5, 6, 8] {
        for group in [32, 64, 128] {
            let name = |what: &str| format!("F32.b{bits}.g{group}.{what}");
            let host = QuantMatrix {
                name: name("packed"),
                rows: 24,
                cols: 256,
                form: Form::Affine {
                    bits,
                    group,
                    kind: PlainType::F32,
                    codes: bytes(&name("packed")),
                    scales: bytes(&name("scales")),
                    biases: bytes(&name("biases")),
                },
            };
            let expected = numbers(&name("y"));
            let bound = 1e-5 * expected.iter().fold(0.0f32, |largest, y| largest.max(y.abs()));
            let mut cpu = cpu(Arithmetic::Lanes, Level::detect(), 1);
            let uploaded = single(&mut cpu, &host);
            let found = linear(&mut cpu, &uploaded, &x);
            assert_eq!(found.len(), expected.len());
            for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
                let off = (found - expected).abs();
                assert!(off <= bound, "{bits} bits, group {group}, output {index}: {found} for {expected}");
            }
        }
    }
}
