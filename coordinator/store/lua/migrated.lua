-- ARGV: request id, epoch, whether the answer has moved. Returns 1 if there was such a migration.
-- The answer keeps one of its two places: that of the destination, under this epoch, or the one that it had.
local id, epoch = ARGV[1], tonumber(ARGV[2])
local request = read(key('req:', id))
if not request.to or tonumber(request.to_epoch) ~= epoch then return 0 end
if ARGV[3] == '0' then
  drop_destination(id, request)
  return 1
end
drop_decode(id, request)
redis.call('HSET', key('req:', id), 'decode', request.to, 'decode_term', request.to_term,
  'decode_tokens', request.to_tokens, 'decode_held', '1', 'state', 'COMMITTED', 'epoch', epoch)
redis.call('HDEL', key('req:', id), 'to', 'to_term', 'to_tokens', 'to_epoch')
redis.call('HINCRBY', key('states'), request.state, -1)
redis.call('HINCRBY', key('states'), 'COMMITTED', 1)
request.decode, request.decode_term, request.decode_held = request.to, request.to_term, '1'
count_answer(request, 1)
return 1
