"""The contact sheet shows every picture with its caption."""

from PIL import Image

from vargen.evaluation.contact_sheets import contact_sheet


def test_every_image_is_on_the_sheet():
    colours = ["red", "lime", "blue", "yellow", "cyan"]
    sheet = contact_sheet([Image.new("RGB", (20, 20), c) for c in colours], ["x" * 90, "", "c", "d", "e"], columns=3, cell=40)
    assert sheet.width == 3 * 46 + 6 and sheet.height == 2 * 62 + 6
    found = {sheet.getpixel((6 + 46 * (i % 3) + 20, 6 + 62 * (i // 3) + 20)) for i in range(5)}
    assert found == {Image.new("RGB", (1, 1), c).getpixel((0, 0)) for c in colours}
    assert all(sheet.getpixel((x, 50)) == (255, 255, 255) for x in range(46, 52)), "captions stay in their cells"
